// Multi-head latent attention as a part of a fused decoder (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1), its up-projections
// absorbed: queries are taken to the latents of the cache, and values are made of what was attended to.
#pragma once

#include "attention_part.h"
#include "head_linear.h"

namespace quire {

template <typename T>
struct LatentAttentionPart {
    LatentAttentionArgument a;
    Matrix<T> down[2], query, o;  // query: of networks whose queries have a latent
    int normed, query_latent = -1, values;
    int64_t all_values = 0;  // inputs of o: the heads of all ranks

    LatentAttentionPart(const LatentAttentionArgument& from, Workspace<T>& work)
        : a(from), down{work.matrix(from.q_down, down_size(), work.hidden), work.matrix(from.kv_down, row_size(), work.hidden)},
          normed(work.activations.add(Stage::first, work.hidden, common_format(down, 2))) {
        for (int rank = 0; a.rank_widths && rank < work.ranks.size(); ++rank) all_values += a.rank_widths[rank];
        if (!a.rank_widths) all_values = value_size();
        o = work.matrix(from.o, work.hidden, all_values);
        values = work.activations.add(Stage::last, all_values, o.format);
        if (a.q_rank) {
            query = work.matrix(a.q_up, query_size(), a.q_rank);
            query_latent = work.activations.add(Stage::middle, a.q_rank, query.format);
        }
        work.need(kProjected, down_size() + row_size());
        work.need(kOwn, down[0].rank_sizes || down[1].rank_sizes ? down[0].rows + down[1].rows : 0);
        work.need(kMixed, std::max<int64_t>(a.q_rank ? query_size() : 0, static_cast<int64_t>(a.num_heads) * a.rank));
        work.need(kAttended, a.num_heads * row_size());
        work.need(kInner, all_values);
        if (a.rank_widths) work.need(kOwn, value_size());
    }

    Strips<T> entry() const { return {down, 2, false}; }
    int input() const { return normed; }
    int64_t head_size() const { return a.nope_dim + a.rotary_dim; }
    int64_t query_size() const { return a.num_heads * head_size(); }
    int64_t value_size() const { return static_cast<int64_t>(a.num_heads) * a.value_dim; }
    int64_t down_size() const { return a.q_rank ? a.q_rank : query_size(); }
    // Numbers of a row of the cache: a latent and a rotated key.
    int64_t row_size() const { return a.rank + a.rotary_dim; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        const int64_t stride = down_size() + row_size(), tokens = work.tokens();
        T* const projected = work.at(kProjected);
        T* const to[] = {projected, projected + down_size()};
        const Strips<T> behind{a.q_rank ? &query : &o, 1, false};
        if (a.rank_widths && !a.q_rank) {  // queries of this rank's heads, latents for all
            const Strips<T> queries{down, 1, false}, latents{down + 1, 1, false};
            pass.project(queries, normed, to, stride, &latents);
            barrier();
            pass.project_whole(latents, normed, to + 1, stride, &behind);
        } else {
            pass.project_whole(entry(), normed, to, stride, &behind);
        }
        const PagedCache cache = make_latent_cache(pass.cache->data, work.step->cache_format == CacheFormat::fp8_ds_mla, static_cast<int>(pass.group->block_size),
                                                      static_cast<int>(row_size()), a.rank, pass.cache->row_bytes,
                                                      pass.cache->block_bytes);
        const Range share = my_share(tokens);
        for (int64_t t = share.begin; t < share.end; ++t) {
            write_latent(work, t, to[1] + t * stride, cache, cache.row(pass.group->slot_mapping[t], 0));
            if (a.q_rank)
                rms_norm(projected + t * stride, projected + t * stride, static_cast<const T*>(nullptr), a.q_norm, a.q_rank, a.eps);
        }
        barrier();
        const T* queries = projected;
        int64_t query_stride = stride;
        if (a.q_rank) {
            pass.set(query_latent, projected, stride);
            T* const whole = work.at(kMixed);
            const Strips<T> next{&o, 1, false};
            pass.project_whole({&query, 1, false}, query_latent, &whole, query_size(), &next);
            queries = whole;
            query_stride = query_size();
        }
        absorb(pass, queries, query_stride);
        attend(pass, cache);
        T* const whole_values = work.at(kInner);
        T* const y = a.rank_widths ? work.at(kOwn) : whole_values;
        head_linear(HeadLinear<T>{.x = work.at(kMixed),
                                  .token_stride = static_cast<int64_t>(a.num_heads) * a.rank,
                                  .x_head_stride = a.rank,
                                  .weight = static_cast<const T*>(a.value_up),
                                  .weight_head_stride = a.value_up_stride,
                                  .out = y,
                                  .out_token_stride = value_size(),
                                  .out_head_stride = a.value_dim,
                                  .tokens = tokens,
                                  .heads = a.num_heads,
                                  .inputs = a.rank,
                                  .outputs = a.value_dim},
                    pass.mine.heads, pass.mine.linear, pass.worker);
        barrier();
        if (a.rank_widths) pass.gather(y, a.rank_widths, whole_values, all_values);
        pass.set(values, whole_values, all_values);
        pass.project_added(o, values);
    }

private:
    const T* angles(const void* const* of, int64_t token) const {
        return static_cast<const T*>(of[a.rotation]) + token * a.rotary_dim;
    }
    void rotate_part(Workspace<T>& work, T* x, int64_t token) const {
        if (a.interleaved) deinterleave(x, a.rotary_dim);
        rotate_in_steps(x, angles(work.step->cos, token), angles(work.step->sin, token), a.rotary_dim);
    }

    // A token's latent and key, as they are projected, into its row of the cache.
    void write_latent(Workspace<T>& work, int64_t token, T* projected, const PagedCache& cache, char* row) const {
        rms_norm(projected, projected, static_cast<const T*>(nullptr), a.kv_norm, a.rank, a.eps);
        rotate_part(work, projected + a.rank, token);
        write_latents(cache, row, projected);
    }

    // Queries [tokens, heads, N + P] -> [tokens, heads, R + P] as they meet the rows of the cache; with a barrier behind.
    void absorb(const Pass<T>& pass, const T* queries, int64_t stride) const {
        Workspace<T>& work = pass.work;
        T* const out = work.at(kAttended);
        head_linear(HeadLinear<T>{.x = queries,
                                  .token_stride = stride,
                                  .x_head_stride = head_size(),
                                  .weight = static_cast<const T*>(a.key_up),
                                  .weight_head_stride = a.key_up_stride,
                                  .out = out,
                                  .out_token_stride = a.num_heads * row_size(),
                                  .out_head_stride = row_size(),
                                  .tokens = work.tokens(),
                                  .heads = a.num_heads,
                                  .inputs = a.nope_dim,
                                  .outputs = a.rank},
                    pass.mine.heads, pass.mine.linear, pass.worker);
        const Range share = my_share(work.tokens() * a.num_heads);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t token = i / a.num_heads, head = i % a.num_heads;
            T* const rotated = out + i * row_size() + a.rank;
            std::copy_n(queries + token * stride + head * head_size() + a.nope_dim, a.rotary_dim, rotated);
            rotate_part(work, rotated, token);
        }
        barrier();
    }

    // [tokens, heads, R] of attended latents; with a barrier behind.
    void attend(const Pass<T>& pass, const PagedCache& cache) const {
        Workspace<T>& work = pass.work;
        const Step<T>& step = *work.step;
        Attention<T> attention_of_step{.query = work.at(kAttended),
                                       .query_stride = a.num_heads * row_size(),
                                       .head_stride = row_size(),
                                       .cache = cache,
                                       .out = work.at(kMixed),
                                       .out_stride = static_cast<int64_t>(a.num_heads) * a.rank,
                                       .sequences = pass.sequences,
                                       .order = work.order,
                                       .num_heads = a.num_heads,
                                       .scale = a.scale,
                                       .paths = step.paths,
                                       .path_stride = step.path_stride};
        part_heads(attention_of_step, omp_get_num_threads());
        attention(attention_of_step, pass.mine.attention, pass.worker, work.partials);
        barrier();
    }
};

}  // namespace quire
