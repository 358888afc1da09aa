// Attention in tiles of AMX, in bfloat16: 16 columns at a time. Included by `attention.h`.
//
// Scores come out as [16 tokens][16 columns], so that softmax runs along the lanes without a sum across them; weights are
// rounded to bfloat16 and turned over before they meet the values, which then need no turning: pairs of tokens are
// interleaved as they are copied. Keys are multiplied where they lie if 16 tokens lie together, else copied.
//
// A task of several key-value heads has few columns of each. They share one tile: the queries of a head are zero in the
// columns of the others, so that its scores add up to the ones of its own columns, and softmax is done once for all.
//
// The queries of a tree share what is before it. From there on each has tokens of its own: one query after another is shown
// its path, while the columns of the others see nothing, which leaves them as they are.
#pragma once

#include "attention.h"
#include "cache_pairs.h"

#ifdef QUIRE_AMX

namespace quire {

class TiledAttention {
public:
    // next: the task that this thread will do then, whose beginning is read ahead; or none.
    TiledAttention(const Attention<BFloat16>& a, const AttentionTask& task, const AttentionTask* next,
                   AttentionScratch& scratch)
        : a_(a), task_(task), next_(next), rows_(a.cache, a.sequences.table(task.sequence), task.kv_head),
          dim_(a.cache.head_dim), value_dim_(a.cache.value_dim), group_(a.group()), heads_(task.num_kv_heads),
          per_head_((task.last - task.first) * group_), columns_(per_head_ * heads_),
          tiles_((columns_ + kTile - 1) / kTile), units_(std::max(heads_, tiles_)),
          path_(a.is_tree(task.sequence) ? a.path(task.sequence, task.first) : nullptr),
          in_place_(tiles_ == 1 && !path_ && a.cache.format == CacheFormat::network && a.cache.block_size % kTile == 0) {
        keys_ = scratch.keys.get<BFloat16>(kPiece * dim_);
        values_ = scratch.values.get<uint32_t>(kPiece / 2 * value_dim_);
        column_ = scratch.column.get<float>(value_dim_);
        queries_ = scratch.queries.get<uint32_t>(units_ * queries_size());
        outputs_ = scratch.outputs.get<float>(2 * units_ * outputs_size());
        weights_ = scratch.weights.get<uint32_t>(kPiece / 2 * kTile);
        scores_ = scratch.scores.get<float>(kPiece * kTile);
        row_scales_ = scratch.row_scales.get<float>(2 * kPiece * kTile);
        state_ = scratch.state.get<float>(7 * tiles_ * kTile);
        factors_ = state_ + 4 * tiles_ * kTile;
        slopes_ = factors_ + tiles_ * kTile;
        positions_ = reinterpret_cast<int32_t*>(slopes_ + tiles_ * kTile);
        set_queries();
        set_columns();
        show({task.first, task.last});
    }

    void run(const Partials& partials, int64_t index) {
        const Span span = task_.tokens(a_);
        bool merged = false;
        clear(0);
        for (int piece = span.begin / kPiece * kPiece; piece < span.end; piece += kPiece) {
            if (piece % kSegment == 0 && piece > span.begin) {
                keep(merged);
                merged = true;
            }
            const Span here{std::max(span.begin, piece), std::min(piece + kPiece, span.end)};
            ahead_ = read_ahead(a_, task_, next_, here.end);
            if (!path_ || piece + kPiece <= path_[1]) {
                attend(piece, here);
                continue;
            }
            for (int query = task_.first; query < task_.last; ++query) {
                path_ = a_.path(task_.sequence, query);
                show({query, query + 1});
                if (here.begin <= path_[0]) attend(piece, {here.begin, std::min(here.end, path_[0] + 1)});
            }
            show({task_.first, task_.last});
        }
        if (merged) keep(true);
        write(merged, partials, index);
    }

private:
    int64_t queries_size() const { return static_cast<int64_t>(dim_) / 2 * kTile; }
    int64_t outputs_size() const { return static_cast<int64_t>(value_dim_) * kTile; }
    int queries_of_column(int c) const { return task_.first + c % per_head_ / group_; }
    int head_of_column(int c) const { return (task_.kv_head + c / per_head_) * group_ + c % group_; }
    int place_of(int position) const { return path_ && position >= path_[1] ? path_[2 + position - path_[1]] : position; }
    [[gnu::always_inline]] const char* row_at(int position) { return rows_.at(place_of(position)); }
    // A unit is one head of the tile, or one tile of the head.
    int tile_of(int unit) const { return heads_ > 1 ? 0 : unit; }
    Span columns_of(int unit) const {
        if (heads_ > 1) return {unit * per_head_, (unit + 1) * per_head_};
        return {0, std::min(columns_ - unit * kTile, kTile)};
    }
    // which: 0 for the segment at hand, 1 for those before it.
    float* tops(int which, int tile) const { return state_ + (which * 2 * tiles_ + tile) * kTile; }
    float* totals(int which, int tile) const { return tops(which, tile) + tiles_ * kTile; }
    // Sums [D / 16][16 columns][16 of D, in the order of the values].
    float* output(int which, int unit, int column, int d) const {
        return outputs_ + (which * units_ + unit) * outputs_size() + d * kTile + column * kTile;
    }
    Column column(int which, int unit, int c) const {
        const int tile = tile_of(unit);
        return {tops(which, tile) + c, totals(which, tile) + c, output(which, unit, c, 0), kTile * kTile};
    }

    void set_queries() {
        const int begin = a_.sequences.query_start_loc[task_.sequence];
        for (int unit = 0; unit < units_; ++unit) {
            const Span columns = columns_of(unit);
            const BFloat16* rows[kTile] = {};
            for (int i = columns.begin; i < columns.end; ++i) {
                const int c = tile_of(unit) * kTile + i;
                rows[i] = a_.query + (begin + queries_of_column(c)) * a_.query_stride + head_of_column(c) * a_.head_stride;
            }
            interleave_pairs(rows, dim_, queries_ + unit * queries_size());
        }
    }

    void set_columns() {
        for (int c = 0; c < tiles_ * kTile; ++c) {
            const bool used = c < columns_;
            factors_[c] = a_.scale * (used ? a_.cache.head_scale(0, task_.kv_head + c / per_head_) : 1.0f);
            slopes_[c] = used && a_.slopes ? a_.slopes[head_of_column(c)] : 0.0f;
        }
    }

    // Columns of other queries see nothing from now on.
    void show(Span queries) {
        for (int c = 0; c < tiles_ * kTile; ++c) {
            const int query = c < columns_ ? queries_of_column(c) : -1;
            positions_[c] = query >= queries.begin && query < queries.end ? a_.position(task_.sequence, query) : -1;
        }
    }
    // The lowest and the highest position of a tile's columns. Columns of several heads repeat their queries, whose positions
    // rise: the first and the last query are those of any head. Those of a tree are in no order.
    Span positions_of(int tile) const {
        const int32_t *const begin = positions_ + tile * kTile, *const end = begin + std::min(columns_ - tile * kTile, kTile);
        if (!path_) return {begin[0], end[-1]};
        const auto lowest_and_highest = std::minmax_element(begin, end);
        return {*lowest_and_highest.first, *lowest_and_highest.second};
    }

    void clear(int which) {
        std::memset(output(which, 0, 0, 0), 0, units_ * outputs_size() * 4);
        for (int c = 0; c < tiles_ * kTile; ++c) {
            tops(which, 0)[c] = -INFINITY;
            totals(which, 0)[c] = 0.0f;
        }
    }

    // Puts the segment at hand behind those before it.
    void keep(bool there_are_some) {
        if (!there_are_some) clear(1);
        for (int unit = 0; unit < units_; ++unit) {
            const Span columns = columns_of(unit);
            for (int c = columns.begin; c < columns.end; ++c) merge(column(1, unit, c), column(0, unit, c), value_dim_ / kTile);
        }
        clear(0);
    }

    void attend(int piece, Span here) {
        if (tiles_ == 1) {
            attend_heads(piece, here);
        } else {
            attend_queries(piece, here);
        }
    }

    // Few columns: the heads one after another, scores of all in one tile.
    void attend_heads(int piece, Span here) {
        const int steps = (here.end - piece + 31) / 32;
        multiply_keys(0, heads_, nullptr, piece, here);
        softmax(0, piece, steps);
        for (int head = 0; head < heads_; ++head) {
            copy_values(head, piece, here);
            multiply_values(head, steps);
        }
    }

    // Many queries of one head: its keys and values once for all of them.
    void attend_queries(int piece, Span here) {
        const char* copied = copy_keys(0, piece, here);
        copy_values(0, piece, here);
        for (int tile = 0; tile < tiles_; ++tile) {
            const Span at = positions_of(tile);
            if (piece > at.end) continue;                                            // before all of these tokens
            if (a_.window > 0 && piece + kPiece <= at.begin + 1 - a_.window) continue;  // behind all their windows
            const Span seen{here.begin, std::min(here.end, at.end + 1)};
            const int steps = (seen.end - piece + 31) / 32;
            multiply_keys(tile, tile + 1, copied, piece, seen);
            softmax(tile, piece, steps);
            multiply_values(tile, steps);
        }
    }

    // The keys of a head as bfloat16, [64][D], and its rows' scales; nothing if they can stay in the cache.
    const char* copy_keys(int head, int piece, Span here) {
        if (in_place_) return nullptr;
        with_rows(a_.cache, [&](auto wide) {
            for (int t = 0; t < (here.end - piece + 31) / 32 * 32; ++t) {
                const int position = piece + t;
                const bool there = position >= here.begin && position < here.end;
                const char* row = there ? row_at(position) + head * a_.cache.head_bytes() : nullptr;
                for (int d = 0; d < dim_; d += 32)
                    _mm512_store_si512(keys_ + t * dim_ + d, there ? wide.load(row, d) : _mm512_setzero_si512());
                if (!a_.cache.scaled_by_row()) continue;
                for (int which = 0; which < 2; ++which) {
                    float scale = 0.0f;
                    if (there) {
                        const int64_t to_scale = which * a_.cache.value_offset() + a_.cache.to_scale(place_of(position));
                        std::memcpy(&scale, row + to_scale, sizeof scale);
                    }
                    set_row_scales(which, head, t, scale);
                }
            }
        });
        return reinterpret_cast<const char*>(keys_);
    }

    // The scale of a key (which = 0) or value for each column that it meets: [2][64 tokens][16 columns].
    void set_row_scales(int which, int head, int t, float scale) {
        float* to = row_scales_ + (which * kPiece + t) * kTile;
        if (heads_ == 1) {
            store(to, splat(scale));
        } else {
            for (int c = head * per_head_; c < (head + 1) * per_head_; ++c) to[c] = scale;
        }
    }

    // scores [64 tokens][16 columns] = sums over units of keys x queries. `copied`: the keys of all units, or none.
    void multiply_keys(int unit, int end, const char* copied, int piece, Span seen) {
        const int blocks = (seen.end - piece + kTile - 1) / kTile;
        const bool spread = tiles_ == 1;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (; unit < end; ++unit) {
            const char* base = spread ? copy_keys(unit, piece, seen) : copied;
            const int64_t stride = base ? dim_ * 2 : a_.cache.row_bytes;
            const char* key[4] = {};
            for (int i = 0; i < blocks; ++i)
                key[i] = base ? base + i * kTile * stride
                              : rows_.at(piece + i * kTile) + (spread ? unit * a_.cache.head_bytes() : 0);
            const uint32_t* q = queries_ + unit * queries_size();
            for (int d = 0; d < dim_; d += 32) {
                _tile_loadd(6, q + d * 8, 64);
                _tile_loadd(4, key[0] + d * 2, stride);
                _tile_dpbf16ps(0, 4, 6);
                if (blocks > 1) {
                    _tile_loadd(5, key[1] + d * 2, stride);
                    _tile_dpbf16ps(1, 5, 6);
                }
                if (spread) ahead_.fetch(16);
                if (blocks > 2) {
                    _tile_loadd(4, key[2] + d * 2, stride);
                    _tile_dpbf16ps(2, 4, 6);
                }
                if (blocks > 3) {
                    _tile_loadd(5, key[3] + d * 2, stride);
                    _tile_dpbf16ps(3, 5, 6);
                }
                if (spread) ahead_.fetch(16);
            }
        }
        _tile_stored(0, scores_, 64);
        _tile_stored(1, scores_ + 256, 64);
        _tile_stored(2, scores_ + 512, 64);
        _tile_stored(3, scores_ + 768, 64);
    }

    // Pairs of tokens, [tokens / 2][D], each 32 elements of D in the order of `unpack`: the elements 0-3, 8-11, 16-19,
    // 24-27 of both, then the others. Zeros where no token is: what lies there may not be a number.
    void copy_values(int head, int piece, Span here) {
        const int64_t offset = a_.cache.value_offset() + head * a_.cache.head_bytes();
        const int used = (here.end - piece + 31) / 32 * 32;
        const int row_lines = static_cast<int>((a_.cache.row_bytes + 63) / 64);
        with_rows(a_.cache, [&](auto wide) {
            for (int t = 0; t < used; t += 2) {
                const char* row[2];
                for (int i = 0; i < 2; ++i) {
                    const int position = piece + t + i;
                    row[i] = position < here.begin || position >= here.end ? nullptr : row_at(position) + offset;
                }
                ahead_.fetch(tiles_ == 1 ? 8 : a_.cache.latent ? 2 * row_lines : 16);
                uint32_t* to = values_ + t / 2 * value_dim_;
                const __m512i zero = _mm512_setzero_si512();
                if (row[0] && row[1]) {
                    for (int d = 0; d < value_dim_; d += 32) interleave(wide.load(row[0], d), wide.load(row[1], d), to + d);
                } else {
                    for (int d = 0; d < value_dim_; d += 32)
                        interleave(row[0] ? wide.load(row[0], d) : zero, row[1] ? wide.load(row[1], d) : zero, to + d);
                }
            }
        });
    }

    static void interleave(__m512i even, __m512i odd, uint32_t* to) {
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(even, odd));
    }

    static constexpr float kLog2E = 1.44269504088896341f;

    // 2^(scores * exponent - start) within 3e-6, far below the rounding of the weights; 0 below the normal numbers, for
    // which the instruction has a slow path. The polynomial is fitted to 2^r on [0, 1] and exact at 0.
    static Floats weights_of(const float* scores, __m512 exponent, __m512 start) {
        const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores), exponent, start);
        const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        __m512 p = _mm512_set1_ps(0.0134266876f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0522424653f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.241280213f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693044841f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
        return (Floats)_mm512_maskz_scalef_ps(kept, p, x);
    }

    // Scores of a tile -> weights, and the state of its columns.
    void softmax(int tile, int piece, int steps) {
        if (a_.soft_cap > 0 || a_.slopes || a_.cache.scaled_by_row()) {
            softmax<false>(tile, piece, steps);
        } else {
            softmax<true>(tile, piece, steps);
        }
    }
    // plain: without soft cap, slopes and scales of rows.
    template <bool plain>
    void softmax(int tile, int piece, int steps) {
        const int32_t* positions = positions_ + tile * kTile;
        Ints at;
        std::memcpy(&at, positions, sizeof at);
        const int tokens = steps * 32;
        const Span all = positions_of(tile);
        const bool whole = piece + tokens <= all.begin + 1 && (a_.window == 0 || piece >= all.end + 1 - a_.window);
        const bool by_row = !plain && a_.cache.scaled_by_row();
        // The scale is left for the exponent, which has a multiplication anyway, whether something is hidden or not: a
        // column must not depend on what its neighbours see.
        const bool early = !plain && (a_.soft_cap > 0 || a_.slopes);
        const Floats scale = load(factors_ + tile * kTile), factor = early ? splat(1.0f) : scale;
        const Floats before = load(tops(0, tile));
        // Four at a time: one maximum or sum would wait for the one before.
        Floats most[4], sums[4] = {};
        for (Floats& each : most) each = splat(-INFINITY);
        const auto finished = [&](int t) {
            Floats s = load(scores_ + t * kTile);
            if (by_row) s *= load(row_scales_ + t * kTile);
            if (early) {
                s *= scale;
                if (a_.soft_cap > 0) s = tanh(s / a_.soft_cap) * a_.soft_cap;
                if (a_.slopes) s -= load(slopes_ + tile * kTile) * __builtin_convertvector(at - (piece + t), Floats);
            }
            if (!whole) {
                const Ints distance = at - (piece + t);
                Ints hidden = distance < 0;
                if (a_.window > 0) hidden |= distance >= a_.window;
                s = hidden ? splat(-INFINITY) : s;
            }
            store(scores_ + t * kTile, s);
            return s;
        };
        const bool as_they_are = plain && whole;
        for (int t = 0; t < tokens; t += 4)
            for (int i = 0; i < 4; ++i) {
                const Floats s = as_they_are ? load(scores_ + (t + i) * kTile) : finished(t + i);
                most[i] = (Floats)_mm512_max_ps((__m512)s, (__m512)most[i]);
            }
        const Floats highest = max(max(max(most[0], most[1]), max(most[2], most[3])) * factor, before);
        // A column that has seen nothing yet keeps -inf; its weights become zeros.
        const Floats base = highest > -INFINITY ? highest : splat(0.0f);
        const Floats shrink = exp(before - base);
        const __m512 exponent = (__m512)(factor * kLog2E), start = (__m512)(base * kLog2E);
        for (int t = 0; t < tokens; t += 32) {
            __m512i pairs[16];
            for (int i = 0; i < 16; ++i) {
                const int row = (t + 2 * i) * kTile;
                Floats a = weights_of(scores_ + row, exponent, start), b = weights_of(scores_ + row + kTile, exponent, start);
                sums[i % 2 * 2] += a;
                sums[i % 2 * 2 + 1] += b;
                if (by_row) {
                    const float* scales = row_scales_ + kPiece * kTile + row;
                    a *= load(scales);
                    b *= load(scales + kTile);
                }
                pairs[i] = pair_up((__m512)a, (__m512)b);
            }
            transpose(pairs);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(weights_ + t * 8 + i * 16, pairs[i]);
        }
        const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        store(totals(0, tile), load(totals(0, tile)) * shrink + sum);
        store(tops(0, tile), highest);
        if (_mm512_cmpneq_epi32_mask((__m512i)shrink, (__m512i)splat(1.0f))) {
            for (int unit = heads_ > 1 ? 0 : tile; unit < (heads_ > 1 ? heads_ : tile + 1); ++unit) {
                const Span columns = columns_of(unit);
                for (int c = columns.begin; c < columns.end; ++c) {
                    if (shrink[c] == 1.0f) continue;
                    for (int d = 0; d < value_dim_; d += 16) {
                        float* o = output(0, unit, c, d);
                        store(o, load(o) * shrink[c]);
                    }
                }
            }
        }
    }

    void multiply_values(int unit, int steps) {
        _tile_loadd(4, weights_, 64);
        _tile_loadd(5, weights_ + 256, 64);
        for (int d = 0; d < value_dim_; d += 32) {
            _tile_loadd(0, output(0, unit, 0, d), 64);
            _tile_loadd(1, output(0, unit, 0, d + 16), 64);
            _tile_loadd(6, values_ + d, value_dim_ * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values_ + d + 16, value_dim_ * 4);
            _tile_dpbf16ps(1, 4, 7);
            if (tiles_ == 1) ahead_.fetch(16);
            if (steps > 1) {
                _tile_loadd(6, values_ + 16 * value_dim_ + d, value_dim_ * 4);
                _tile_dpbf16ps(0, 5, 6);
                _tile_loadd(7, values_ + 16 * value_dim_ + d + 16, value_dim_ * 4);
                _tile_dpbf16ps(1, 5, 7);
                if (tiles_ == 1) ahead_.fetch(16);
            }
            _tile_stored(0, output(0, unit, 0, d), 64);
            _tile_stored(1, output(0, unit, 0, d + 16), 64);
        }
    }

    // which: where the sums are.
    void write(int which, const Partials& partials, int64_t index) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int unit = 0; unit < units_; ++unit) {
            const Span columns = columns_of(unit);
            for (int i = columns.begin; i < columns.end; ++i) {
                for (int d = 0; d < value_dim_; d += 32) {
                    const __m512 a = (__m512)load(output(which, unit, i, d)), b = (__m512)load(output(which, unit, i, d + 16));
                    store(column_ + d, (Floats)_mm512_permutex2var_ps(a, low, b));
                    store(column_ + d + 16, (Floats)_mm512_permutex2var_ps(a, high, b));
                }
                const int c = tile_of(unit) * kTile + i;
                const Column done = column(which, unit, i);
                if (task_.segment < 0) {
                    write_column(a_, task_, queries_of_column(c), head_of_column(c), {done.top, done.total, column_, kLanes});
                } else {
                    const Column to = partials.column(index, c);
                    *to.top = *done.top;
                    *to.total = *done.total;
                    std::memcpy(to.out, column_, value_dim_ * sizeof(float));
                }
            }
        }
    }

    const Attention<BFloat16>& a_;
    const AttentionTask& task_;
    const AttentionTask* next_;
    CacheRows rows_;
    ReadAhead ahead_;
    const int dim_, value_dim_, group_, heads_, per_head_, columns_, tiles_, units_;
    const int32_t* path_;  // of the query at hand, in a tree
    const bool in_place_;
    BFloat16* keys_;
    uint32_t *values_, *weights_, *queries_;
    float *scores_, *outputs_, *row_scales_, *state_, *factors_, *slopes_, *column_;
    int32_t* positions_;
};

}  // namespace quire

#endif
