// Attention over the paged cache as a part of a fused decoder: projections, norms of heads, rotation, attention, projection.
#pragma once

#include "workspace.h"

namespace quire {

// Rotates the pairs (i, i + dim / 2) of a head with each product and the sum rounded, as separate ops do it.
template <typename T>
inline void rotate_in_steps(T* head, const T* cos, const T* sin, int dim) {
    const int half = dim / 2;
    const auto turned = [](Floats a, Floats c, Floats b, Floats s) {
        Floats along = rounded(a * c, T{}), across = rounded(b * s, T{});
        in_register(along);  // or product and sum became one operation
        in_register(across);
        return along + across;
    };
    for (int i = 0; i < half; i += kLanes) {
        const int count = half - i;
        const Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
        const Floats upper = turned(a, load_some(cos + i, count), b, load_some(sin + i, count));
        store_some(head + half + i, turned(b, load_some(cos + half + i, count), a, load_some(sin + half + i, count)), count);
        store_some(head + i, upper, count);
    }
}

template <typename T>
struct AttentionPart {
    Matrix<T> qkv[3], o;
    AttentionArgument a;
    int normed, attended;  // activations of qkv and of o
    int64_t attended_size = 0;  // inputs of o: the heads of all ranks

    AttentionPart(const AttentionArgument& from, Workspace<T>& work) : a(from) {
        const int64_t hidden = work.hidden;
        qkv[0] = work.matrix(a.q, query_heads() * a.head_dim, hidden);
        if (!is_cross()) {
            qkv[1] = work.matrix(a.k, a.num_kv_heads * a.head_dim, hidden);
            qkv[2] = work.matrix(a.v, a.num_kv_heads * a.head_dim, hidden);
        }
        for (int rank = 0; a.rank_widths && rank < work.ranks.size(); ++rank) attended_size += a.rank_widths[rank];
        if (!a.rank_widths) attended_size = query_size();
        o = work.matrix(a.o, hidden, attended_size);
        normed = work.activations.add(Stage::first, hidden, common_format(qkv, 3));
        attended = work.activations.add(Stage::last, attended_size, o.format);
        work.need(kProjected, width());
        work.need(kAttended, attended_size);
        work.need(kOwn, a.rank_widths ? query_size() : is_gathered() ? qkv[0].rows + qkv[1].rows + qkv[2].rows : 0);
        if (a.norm_of_all_heads) work.need(kHeadFactors, 2);
    }

    // Whether the cache has what was written elsewhere: there are queries alone, each of which attends to all of its sequence.
    bool is_cross() const { return !a.k.data; }
    int num_projections() const { return is_cross() ? 1 : 3; }
    Strips<T> entry() const { return {qkv, num_projections(), false}; }
    int input() const { return normed; }
    int64_t query_size() const { return static_cast<int64_t>(a.num_heads) * a.head_dim; }
    // Heads of the query projection: with a gate behind each query where the result is gated.
    int64_t query_heads() const { return a.num_heads * (a.gated ? 2 : 1); }
    int64_t width() const { return (query_heads() + (is_cross() ? 0 : 2 * a.num_kv_heads)) * a.head_dim; }

    // Whether each rank has all heads, but computes only some outputs of their projections.
    bool is_gathered() const { return a.q.rank_sizes || a.k.rank_sizes || a.v.rank_sizes; }

    // Where heads lie: whole ones, [heads][tokens][D], so that a tile's outputs are close together; narrow ones as they come.
    struct Heads {
        T* data;
        int64_t token_stride, head_stride;
        T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
    };
    Heads heads(Workspace<T>& work) const {
        const bool by_head = a.head_dim % (2 * kTile) == 0 && !is_gathered();
        return {work.at(kProjected), by_head ? a.head_dim : width(), by_head ? work.tokens() * a.head_dim : a.head_dim};
    }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        const Heads places = heads(work);
        project_heads(pass, places);
        const PagedCache cache =
            make_cache<T>(pass.cache->data, work.step->cache_format, a.num_kv_heads, static_cast<int>(pass.group->block_size),
                          a.head_dim, a.kv_scale, pass.cache->block_bytes);
        if (a.norm_of_all_heads) {
            measure_heads(work, places);
            barrier();
        }
        if (!is_cross()) {
            place_heads(pass, places, cache);
            barrier();
        }
        T* const whole = work.at(kAttended);
        T* const out = a.rank_widths ? work.at(kOwn) : whole;
        const Step<T>& step = *work.step;
        attention(Attention<T>{.query = places.data,
                               .query_stride = places.token_stride,
                               .head_stride = places.head_stride * (a.gated ? 2 : 1),
                               .cache = cache,
                               .out = out,
                               .out_stride = query_size(),
                               .sequences = is_cross() ? step.cross_sequences(*pass.group) : pass.sequences,
                               .order = is_cross() ? work.cross_order : work.order,
                               .num_heads = a.num_heads,
                               .scale = a.scale,
                               .window = a.window,
                               .soft_cap = a.soft_cap,
                               .sinks = a.sinks,
                               .slopes = a.slopes,
                               .paths = is_cross() ? nullptr : step.paths,
                               .path_stride = step.path_stride,
                               .int8_products = a.int8_products != 0},
                  pass.mine.attention, pass.worker, work.partials);
        barrier();
        if (a.gated) {
            gate(work, places, out);
            barrier();
        }
        if (a.rank_widths) pass.gather(out, a.rank_widths, whole, attended_size);
        pass.set(attended, whole, attended_size);
        const LoraTable* const adapters = pass.adapters ? pass.adapters + num_projections() : nullptr;
        if (adapters) work.shrink(adapters, 1, whole, attended_size);
        pass.project_added(o, attended, adapters);
    }

private:
    void project_heads(const Pass<T>& pass, const Heads& places) const {
        Workspace<T>& work = pass.work;
        const int64_t query = query_heads() * a.head_dim, kv = static_cast<int64_t>(a.num_kv_heads) * a.head_dim;
        const int64_t block = places.token_stride == a.head_dim ? a.head_dim : 0;
        const int64_t per_head = block ? work.tokens() : 1;
        T* const to[] = {places.data, places.data + query * per_head, places.data + (query + kv) * per_head};
        const Strips<T> behind{&o, 1, false};
        const OwnOutputs<T> own = pass.own_outputs(entry(), to, places.token_stride);
        if (pass.adapters) work.shrink(pass.adapters, num_projections(), work.at(kNormed), work.hidden);
        linear(entry(), work.activations[normed], pass.mine.linear, pass.worker,
               ToRows<T, T>{qkv, own.to, own.stride, work.tokens(), block}, &behind);
        barrier();
        if (pass.adapters) {
            LoraExpansion<T> added[3];
            for (int i = 0; i < num_projections(); ++i)
                added[i] = {pass.adapters + i, work.inner_of(i), qkv[i].rows, {own.to[i], own.stride, places.head_stride, block}};
            lora_expand<T>(added, num_projections(), work.step->lora);
            barrier();
        }
        pass.gather(entry(), own, to, places.token_stride);
    }

    // What queries, and keys, of each token are divided by where all heads have one norm; the inverse.
    void measure_heads(Workspace<T>& work, const Heads& places) const {
        float* const factors = work.at(kHeadFactors);
        const Range share = my_share(2 * work.tokens());
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int first = i % 2 ? a.num_heads : 0, count = i % 2 ? a.num_kv_heads : a.num_heads;
            float total = 0.0f;
            for (int head = first; head < first + count; ++head)
                total += sum_of_squares(places.at(i / 2, head), a.head_dim);
            factors[i] = 1.0f / std::sqrt(total / static_cast<float>(count * a.head_dim) + a.eps);
        }
    }

    // Norms and rotates queries and keys; keys and values go to their slots. A head's tokens lie together, and so do their
    // slots: some of them at a time, as many as share a tile.
    void place_heads(const Pass<T>& pass, const Heads& places, const PagedCache& cache) const {
        const int per_token = a.num_heads + 2 * a.num_kv_heads;
        const Range share = my_share((pass.work.tokens() + kTile - 1) / kTile * per_token);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t first = i / per_token * kTile, last = std::min(first + kTile, pass.work.tokens());
            const int head = static_cast<int>(i % per_token), kv_head = head - a.num_heads;
            const bool is_value = kv_head >= a.num_kv_heads;  // keys, then values, as in the cache
            const int64_t place = kv_head < 0 ? head * (a.gated ? 2 : 1) : query_heads() + kv_head;
            for (int64_t token = first; token < last; ++token) {
                T* const x = places.at(token, place);
                if (!is_value) norm_and_rotate(pass.work, x, token, head);
                if (kv_head < 0) continue;
                write_row(cache, pass.group->slot_mapping[token], x, is_value, kv_head - is_value * a.num_kv_heads);
            }
        }
    }

    // One query, or key behind the queries, of a token.
    void norm_and_rotate(Workspace<T>& work, T* x, int64_t token, int head) const {
        const int kv_head = head - a.num_heads;
        const float* const weight = kv_head < 0 ? a.q_norm : a.k_norm;
        const auto normalise = [&] {
            if (a.norm_of_all_heads) {
                const int64_t at = kv_head < 0 ? head : kv_head;
                weigh_row(x, work.at(kHeadFactors)[2 * token + (kv_head >= 0)], weight + at * a.head_dim, a.head_dim);
            } else {
                rms_norm(x, x, static_cast<const T*>(nullptr), weight, a.head_dim, a.eps);
            }
        };
        if (weight && !a.norm_after_rotation) normalise();
        if (a.rotation >= 0) {
            const auto angles = [&](const void* const* of) {
                return static_cast<const T*>(of[a.rotation]) + token * a.rotary_dim;
            };
            if (a.interleaved) deinterleave(x, a.rotary_dim);
            if (a.rounds_steps) {
                rotate_in_steps(x, angles(work.step->cos), angles(work.step->sin), a.rotary_dim);
            } else {
                rotate(x, x, angles(work.step->cos), angles(work.step->sin), a.rotary_dim);
            }
        }
        if (weight && a.norm_after_rotation) normalise();
    }

    // The result of each head times the sigmoid of the gate that lies behind its query.
    void gate(Workspace<T>& work, const Heads& places, T* out) const {
        const Range share = my_share(work.tokens() * a.num_heads);
        for (int64_t i = share.begin; i < share.end; ++i) {
            T* const x = out + i * a.head_dim;  // [tokens, heads, D]
            const T* const gates = places.at(i / a.num_heads, 2 * (i % a.num_heads) + 1);
            activate([](Floats v) { return sigmoid(v); }, x, gates, static_cast<const T*>(x), a.head_dim);
        }
    }
};

}  // namespace quire
