// A program that compares a build of the kernels with plain loops in double, for machines that Python does not run on:
// cross-compiled together with `csrc/kernels.cpp` and run on the machine, or under an emulator of it.
//
// Knows the C interface and the number formats; exits with 1 and says what is off when something is.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../src/quire_kernels_cpu/csrc/kernels.h"
#include "../src/quire_kernels_cpu/csrc/team.h"

namespace {

enum { kFloat32, kBFloat16, kFloat16 };
const char* const kNames[] = {"float32", "bfloat16", "float16"};
const double kTolerance[] = {2e-6, 8e-3, 1e-3};
std::mt19937 generator(7);
int failures = 0;

// Numbers of one of the formats; `set` rounds, so that loops and kernels see the same ones.
struct Numbers {
    int dtype;
    int64_t count;
    std::vector<char> bytes;

    Numbers(int of, int64_t n, double width = 0.0) : dtype(of), count(n), bytes(n * (of == kFloat32 ? 4 : 2)) {
        std::normal_distribution<double> normal;
        if (width > 0)
            for (int64_t i = 0; i < n; ++i) set(i, width * normal(generator));
    }
    void* data() { return bytes.data(); }
    double operator[](int64_t i) const {
        if (dtype == kFloat32) {
            float value;
            std::memcpy(&value, &bytes[i * 4], 4);
            return value;
        }
        const int fraction_bits = dtype == kBFloat16 ? 7 : 10, bias = dtype == kBFloat16 ? 127 : 15;
        uint16_t bits;
        std::memcpy(&bits, &bytes[i * 2], 2);
        const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
        const int whole = exponent ? fraction + (1 << fraction_bits) : fraction;
        return std::ldexp(bits >> 15 ? -whole : whole, std::max(exponent, 1) - bias - fraction_bits);
    }
    // Within the format's range.
    void set(int64_t i, double x) {
        if (dtype == kFloat32) {
            const float value = static_cast<float>(x);
            std::memcpy(&bytes[i * 4], &value, 4);
            return;
        }
        const int fraction_bits = dtype == kBFloat16 ? 7 : 10, bias = dtype == kBFloat16 ? 127 : 15;
        int exponent;
        std::frexp(x, &exponent);
        exponent = x == 0.0 ? 1 : std::max(exponent - 1 + bias, 1);
        // The first bit of a normal number is not kept: it counts one up in the exponent, as rounding up to it does.
        const int whole = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), fraction_bits - exponent + bias)));
        const uint16_t bits = static_cast<uint16_t>(((exponent - 1) << fraction_bits) + whole + (std::signbit(x) << 15));
        std::memcpy(&bytes[i * 2], &bits, 2);
    }
};

void check(const char* what, const Numbers& got, const std::vector<double>& expected) {
    double off = 0.0, largest = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::fabs(got[i] - expected[i]);
        off = error > off || error != error ? error : off;
        largest = std::max(largest, std::fabs(expected[i]));
    }
    const bool good = off <= kTolerance[got.dtype] * largest;
    failures += !good;
    std::printf("%s %-8s %s: off by %.1e of %.1e\n", good ? "ok  " : "FAIL", kNames[got.dtype], what, off, largest);
}

void expect(bool good, int dtype, const char* what) {
    failures += !good;
    std::printf("%s %-8s %s\n", good ? "ok  " : "FAIL", kNames[dtype], what);
}

void check_linear(int dtype, int64_t tokens, int64_t cols, int64_t rows, bool int8) {
    Numbers x(dtype, tokens * cols, 1.0), weight(dtype, rows * cols, 0.5), bias(dtype, rows, 1.0), scale(dtype, rows, 0.1);
    std::vector<int8_t> bytes(rows * cols);
    for (auto& b : bytes) b = static_cast<int8_t>(static_cast<int>(generator() % 255) - 127);
    const auto multiply = [&](int64_t first, int64_t count, Numbers& y) {
        const void* data = int8 ? static_cast<const void*>(bytes.data()) : weight.data();
        const MatrixArgument matrix{data, int8 ? scale.data() : nullptr, nullptr, bias.data(), int8, 0, 0, 0.0f};
        quire_linear(dtype, x.bytes.data() + first * x.bytes.size() / tokens, &matrix, y.data(), count, cols, rows, 0);
    };
    Numbers got(dtype, tokens * rows);
    multiply(0, tokens, got);
    std::vector<double> expected(tokens * rows);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < rows; ++r) {
            double sum = 0.0;
            for (int64_t k = 0; k < cols; ++k)
                sum += x[t * cols + k] * (int8 ? bytes[r * cols + k] * scale[r] : weight[r * cols + k]);
            expected[t * rows + r] = sum + bias[r];
        }
    check(int8 ? "linear, int8 weights" : "linear", got, expected);
    Numbers alone(dtype, rows);
    multiply(tokens - 1, 1, alone);
    const bool same = !std::memcmp(alone.data(), got.bytes.data() + got.bytes.size() - alone.bytes.size(), alone.bytes.size());
    expect(same, dtype, "a row alone gives the same bits");
}

// Int4 in groups of 32, as `quire_ops` packs it.
void check_int4(int dtype, int64_t tokens, int64_t cols, int64_t rows) {
    const int64_t pieces = (cols + 127) / 128, groups = (cols + 31) / 32, blocks = (rows + 15) / 16;
    Numbers x(dtype, tokens * cols, 1.0), bias(dtype, rows, 1.0), scale(dtype, blocks * groups * 16, 0.1), got(dtype, tokens * rows);
    std::vector<uint8_t> packed(rows * pieces * 64);
    std::vector<int16_t> zero(blocks * groups * 16);
    for (auto& z : zero) z = static_cast<int16_t>(static_cast<int>(generator() % 17) - 8);
    std::vector<double> expected(tokens * rows);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t outputs = std::min<int64_t>(16, rows - r / 16 * 16);
        for (int64_t k = 0; k < pieces * 128; ++k) {
            const int element = k < cols ? static_cast<int>(generator() % 16) - 8 : 0;
            const int64_t step = k / 128 * 16 + k % 64 / 4;
            uint8_t& byte = packed[r / 16 * 16 * pieces * 64 + (step * outputs + r % 16) * 4 + k % 4];
            byte |= static_cast<uint8_t>((element + 8) << (k % 128 < 64 ? 0 : 4));
            if (k >= cols) continue;
            const int64_t group = (r / 16 * groups + k / 32) * 16 + r % 16;
            for (int64_t t = 0; t < tokens; ++t) expected[t * rows + r] += x[t * cols + k] * scale[group] * (element - zero[group]);
        }
        for (int64_t t = 0; t < tokens; ++t) expected[t * rows + r] += bias[r];
    }
    const MatrixArgument matrix{packed.data(), scale.data(), zero.data(), bias.data(), 3, 32, dtype == kFloat32, 0.0f};
    quire_linear(dtype, x.data(), &matrix, got.data(), tokens, cols, rows, 0);
    check("linear, int4 weights", got, expected);
}

void check_norm(int dtype, int64_t rows, int64_t size) {
    Numbers x(dtype, rows * size, 3.0), added(dtype, rows * size, 1.0), weight(dtype, size, 1.0), to(dtype, rows * size);
    std::vector<double> expected(rows * size);
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0.0;
        Numbers total(dtype, size);
        for (int64_t i = 0; i < size; ++i) {
            total.set(i, x[r * size + i] + added[r * size + i]);
            squares += total[i] * total[i];
        }
        for (int64_t i = 0; i < size; ++i)
            expected[r * size + i] = total[i] / std::sqrt(squares / size + 1e-6) * weight[i];
    }
    quire_rms_norm(dtype, to.data(), x.data(), added.data(), weight.data(), rows, size, 1e-6f);
    check("rms norm of a sum", to, expected);
}

void check_activations(int dtype, int64_t count) {
    struct Function {
        const char* name;
        int kind;  // of quire::Activation
        double (*of)(double);
    };
    const Function functions[] = {
        {"silu", 0, [](double x) { return x / (1 + std::exp(-x)); }},
        {"gelu", 1, [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }},
        {"sigmoid", 3, [](double x) { return 1 / (1 + std::exp(-x)); }},
        {"tanh", 4, [](double x) { return std::tanh(x); }},
        {"gelu_erf", 5, [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }},
        {"expm1", 6, [](double x) { return std::expm1(x); }},
    };
    for (const Function& function : functions) {
        const bool grows = function.of(100.0) > 100.0;  // beyond float16
        Numbers gate(dtype, count, grows ? 1.0 : 8.0), up(dtype, count, 1.0), to(dtype, count);
        gate.set(0, -100.0);
        if (!grows) gate.set(1, 100.0);
        std::vector<double> plain(count), product(count);
        for (int64_t i = 0; i < count; ++i) product[i] = (plain[i] = function.of(gate[i])) * up[i];
        quire_activate(dtype, function.kind, to.data(), gate.data(), nullptr, count);
        check(function.name, to, plain);
        quire_activate(dtype, function.kind, gate.data(), gate.data(), up.data(), count);
        check((std::string(function.name) + " and mul").c_str(), gate, product);
    }
}

// Blocks in an order of chance: a decode, a prompt, and a chunk of one.
// Rows of the KV cache in a format of `CacheFormat`, those of fewer bits as random codes; block_size of them lie together,
// and behind them their scales if they have such.
struct CachedRows {
    int format, dim, block_size;
    int64_t row_bytes, scale_bytes;
    Numbers plain;                // of the network's type
    std::vector<uint8_t> codes;

    CachedRows(int dtype, int of, int64_t rows, int d, int rows_together)
        : format(of), dim(d), block_size(rows_together), row_bytes(of == 0 ? d * (dtype == kFloat32 ? 4 : 2) : of < 4 ? d : d / 2),
          scale_bytes(of < 3 ? 0 : 4), plain(dtype, of == 0 ? rows * d : 0, 1.0), codes(of == 0 ? 0 : rows * (row_bytes + scale_bytes)) {
        for (uint8_t& code : codes) {
            code = static_cast<uint8_t>(generator());
            const int first_special = of == 1 ? 0x7f : of == 2 ? 0x7c : 0x80;
            if ((code & 0x7f) >= first_special) code &= 0x80;  // zero in place of what is infinite or no number
            if (of == 3 && code == 0x80) code = 0;             // -128 is never written
        }
        for (int64_t row = 0; of > 2 && row < rows; ++row) {
            const float scale = (of == 3 ? 0.02f : 0.3f) * (1.0f + row % 5);
            std::memcpy(&codes[scale_at(row)], &scale, 4);
        }
    }
    int64_t block_at(int64_t row) const { return row / block_size * block_size * (row_bytes + scale_bytes); }
    int64_t scale_at(int64_t row) const { return block_at(row) + block_size * row_bytes + row % block_size * scale_bytes; }
    void* data() { return format == 0 ? plain.data() : codes.data(); }
    double at(int64_t row, int d) const {
        if (format == 0) return plain[row * dim + d];
        const uint8_t* const of_row = &codes[block_at(row) + row % block_size * row_bytes];
        if (format < 3) {
            const int bits = format == 1 ? 3 : 2, bias = format == 1 ? 7 : 15, exponent = (of_row[d] & 0x7f) >> bits;
            const int whole = (of_row[d] & ((1 << bits) - 1)) + (exponent ? 1 << bits : 0);
            return std::ldexp(of_row[d] & 0x80 ? -whole : whole, std::max(exponent, 1) - bias - bits);
        }
        float scale;
        std::memcpy(&scale, &codes[scale_at(row)], 4);
        if (format == 3) return scale * static_cast<int8_t>(of_row[d]);
        return scale * ((d < dim / 2 ? of_row[d] & 15 : of_row[d - dim / 2] >> 4) - 8);
    }
};

void check_attention(int dtype, int format, int heads, int kv_heads, int dim, int window, float soft_cap) {
    const int32_t starts[] = {0, 1, 20, 27}, lengths[] = {130, 19, 75};
    const int block_size = 7, stride = 19, num_blocks = 3 * stride, tokens = 27;
    std::vector<int32_t> table(num_blocks);
    for (int i = 0; i < num_blocks; ++i) table[i] = i;
    std::shuffle(table.begin(), table.end(), generator);
    CachedRows kv(dtype, format, num_blocks * 2 * kv_heads * block_size, dim, block_size);
    // Codes of fp8 are large numbers: scores stay as near to each other as those of others.
    Numbers query(dtype, tokens * heads * dim, format == 1 ? 0.01 : format == 2 ? 1e-4 : 1.0), got(dtype, tokens * heads * dim);
    const double scale = 1 / std::sqrt(dim);
    std::vector<double> expected(tokens * heads * dim, 0.0);
    for (int s = 0; s < 3; ++s)
        for (int t = starts[s]; t < starts[s + 1]; ++t)
            for (int h = 0; h < heads; ++h) {
                const int position = lengths[s] - starts[s + 1] + t, kv_head = h / (heads / kv_heads);
                const int oldest = window ? std::max(0, position + 1 - window) : 0;
                std::vector<double> out(dim, 0.0);
                double total = 0.0;
                for (int p = oldest; p <= position; ++p) {
                    const int64_t head = table[s * stride + p / block_size] * 2LL * kv_heads + kv_head;
                    const int64_t key = head * block_size + p % block_size, value = key + kv_heads * block_size;
                    double score = 0.0;
                    for (int d = 0; d < dim; ++d) score += query[(t * heads + h) * dim + d] * kv.at(key, d);
                    score *= scale;
                    if (soft_cap > 0) score = soft_cap * std::tanh(score / soft_cap);
                    total += std::exp(score);
                    for (int d = 0; d < dim; ++d) out[d] += std::exp(score) * kv.at(value, d);
                }
                for (int d = 0; d < dim; ++d) expected[(t * heads + h) * dim + d] = out[d] / total;
            }
    quire_attention(dtype, query.data(), kv.data(), format, nullptr, got.data(), table.data(), stride, starts, lengths, 3,
                    heads, kv_heads, dim, block_size, 2 * kv_heads * block_size * (kv.row_bytes + kv.scale_bytes),
                    static_cast<float>(scale), window, soft_cap, nullptr, nullptr, nullptr, 0, 0);
    const char* const names[] = {"attention", "attention over fp8", "attention over e5m2", "attention over int8", "attention over int4"};
    check(names[format], got, expected);
}

// One row for a token, the beginning of a longer one: a decode, a prompt, and a chunk of one.
void check_latent_attention(int dtype, int heads, int width, int rank) {
    const int32_t starts[] = {0, 1, 20, 27}, lengths[] = {1100, 19, 75};
    const int block_size = 7, stride = 158, num_blocks = 3 * stride, tokens = 27, apart = width + 3;
    std::vector<int32_t> table(num_blocks);
    for (int i = 0; i < num_blocks; ++i) table[i] = i;
    std::shuffle(table.begin(), table.end(), generator);
    Numbers query(dtype, tokens * heads * width, 1.0), rows(dtype, num_blocks * block_size * apart, 1.0);
    Numbers got(dtype, tokens * heads * rank);
    const double scale = 1 / std::sqrt(width);
    std::vector<double> expected(tokens * heads * rank, 0.0);
    for (int s = 0; s < 3; ++s)
        for (int t = starts[s]; t < starts[s + 1]; ++t)
            for (int h = 0; h < heads; ++h) {
                double total = 0.0;
                std::vector<double> out(rank, 0.0);
                for (int p = 0; p <= lengths[s] - starts[s + 1] + t; ++p) {
                    const int64_t row = (table[s * stride + p / block_size] * block_size + p % block_size) * apart;
                    double score = 0.0;
                    for (int d = 0; d < width; ++d) score += query[(t * heads + h) * width + d] * rows[row + d];
                    const double weight = std::exp(score * scale);
                    total += weight;
                    for (int d = 0; d < rank; ++d) out[d] += weight * rows[row + d];
                }
                for (int d = 0; d < rank; ++d) expected[(t * heads + h) * rank + d] = out[d] / total;
            }
    const int64_t block_bytes = static_cast<int64_t>(rows.bytes.size()) / num_blocks;
    quire_latent_attention(dtype, query.data(), rows.data(), 0, got.data(), table.data(), stride, starts, lengths, 3, heads,
                           width, rank, block_size, block_bytes / block_size, block_bytes, static_cast<float>(scale),
                           nullptr, 0);
    check("latent attention", got, expected);
}

}  // namespace

// A larger batch than any before, again and again: memory is seldom asked for anew.
void check_buffer() {
    quire::Buffer buffer;
    std::vector<std::vector<char>> between;  // so that it cannot grow in place
    int moves = 0;
    for (int64_t count = 1; count <= 4096; ++count) {
        const float* const before = buffer.get<float>(count - 1);
        float* const numbers = buffer.get<float>(count);
        std::fill_n(numbers, count, 1.0f);
        between.emplace_back(64 + count % 64);
        moves += numbers != before;
    }
    if (moves > 24) {
        ++failures;
        std::printf("a buffer of 1 to 4096 numbers moves %d times\n", moves);
    }
}

int main() {
    check_buffer();
    for (int dtype = 0; dtype < 3; ++dtype) {
        for (const bool int8 : {false, true}) {
            check_linear(dtype, 1, 64, 64, int8);
            check_linear(dtype, 19, 70, 45, int8);
            check_linear(dtype, 33, 256, 97, int8);
        }
        check_int4(dtype, 1, 96, 33);
        check_int4(dtype, 6, 200, 45);
        check_norm(dtype, 3, 7);
        check_norm(dtype, 40, 1024);
        check_activations(dtype, 37);
        check_activations(dtype, 20000);
        for (int format = 0; format < 5; ++format) {
            check_attention(dtype, format, 4, 2, 64, 0, 0.0f);
            check_attention(dtype, format, 6, 2, 20, 50, 0.0f);
            check_attention(dtype, format, 8, 1, 128, 7, 5.0f);
        }
        check_latent_attention(dtype, 3, 37, 21);
        check_latent_attention(dtype, 32, 96, 64);
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
