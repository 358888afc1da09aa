// Late interaction: the sum over a query's vectors of the largest product with one of a document's (Khattab & Zaharia 2020,
// arXiv:2004.12832, eq. 3).
//
// Tokens of the query are in the lanes (`columns.h`), documents are weights, read where they are: a piece of a document after
// the other, whose products are forgotten when their maximum is taken. Pairs are computed one by one, each by one thread, so
// that a score does not depend on the others. With AMX vectors of bfloat16 are multiplied by tiles.
#pragma once

#include "columns.h"
#include "tiles.h"

namespace quire {

constexpr int64_t kDocumentPiece = 120;  // tokens; a multiple of all that `column_rows` gives

struct MaxSimScratch {
    Buffer query, widened, products;
};

template <typename T>
struct MaxSim {
    const T *queries, *documents;               // [tokens, dim]
    const int64_t *query_lens, *document_lens;  // [num_queries], [num_documents]
    int64_t num_queries, num_documents;         // num_queries: 1 or as many
    int64_t dim;
    float* scores;  // [num_documents]
};

#ifdef QUIRE_AMX
// 16 tokens of a query as pairs of bfloat16 [dim / 2][16], zeros behind `count` of them. dim: a multiple of 32.
inline void query_pairs(const BFloat16* from, int64_t count, int64_t dim, uint32_t* to) {
    const BFloat16* rows[kTile];
    for (int64_t i = 0; i < kTile; ++i) rows[i] = i < count ? from + i * dim : nullptr;
    interleave_pairs(rows, dim, to);
}

// Maxima of the products of a document's tokens with 16 * kTiles of the query's.
template <int kTiles>
inline void max_products(const BFloat16* document, int64_t length, int64_t dim, const uint32_t* query, BFloat16* padded,
                         float* products, Floats* most) {
    for (int64_t token = 0; token < length; token += 2 * kTile) {
        const int64_t count = std::min<int64_t>(2 * kTile, length - token);
        const BFloat16* from = document + token * dim;
        if (count < 2 * kTile) {
            std::memset(padded, 0, 2 * kTile * dim * sizeof *padded);
            std::memcpy(padded, from, count * dim * sizeof *padded);
            from = padded;
        }
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kTiles > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(4, from + d, dim * sizeof *from);
            _tile_loadd(5, from + kTile * dim + d, dim * sizeof *from);
            _tile_loadd(6, query + d / 2 * kTile, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if constexpr (kTiles > 1) {
                _tile_loadd(7, query + (dim / 2 + d / 2) * kTile, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, products, 64);
        _tile_stored(1, products + 256, 64);
        if constexpr (kTiles > 1) {
            _tile_stored(2, products + 512, 64);
            _tile_stored(3, products + 768, 64);
        }
        for (int v = 0; v < kTiles; ++v)
            for (int64_t i = 0; i < count; ++i) most[v] = max(load(products + v * 512 + i * kLanes), most[v]);
    }
}
#endif

// Whether tiles multiply vectors of T.
template <typename T>
inline bool maxsim_by_tiles(int64_t dim) {
    return std::is_same_v<T, BFloat16> && tiles_granted && dim % 32 == 0;
}

// The pairs of one thread.
template <typename T>
class MaxSimPairs {
public:
    MaxSimPairs(const MaxSim<T>& op, MaxSimScratch& scratch) : op_(op), scratch_(scratch), by_tiles_(maxsim_by_tiles<T>(op.dim)) {}

    float score(int64_t query, int64_t query_begin, int64_t document, int64_t document_begin) {
        const int64_t length = op_.query_lens[query];
        if (query != query_) set_query(op_.queries + query_begin * op_.dim, length);
        query_ = query;
        const T* const from = op_.documents + document_begin * op_.dim;
        Floats total = {};
        for (int64_t token = 0; token < length;) {
            constexpr int kMost = 2;
            const int64_t tiles = std::min<int64_t>(kMost, (length - token + kLanes - 1) / kLanes);
            Floats most[kMost];
            for (Floats& each : most) each = splat(-INFINITY);
            with_count<kMost>(tiles, [&](auto count) { meet<decltype(count)::value>(from, op_.document_lens[document], token / kLanes, most); });
            for (int v = 0; v < tiles; ++v, token += kLanes)
                for (int i = 0; i < kLanes && token + i < length; ++i) total[i] += most[v][i];
        }
        return sum(total);
    }

private:
    void set_query(const T* from, int64_t length) {
        const int64_t tiles = (length + kLanes - 1) / kLanes;
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (by_tiles_) {
                uint32_t* const pairs = scratch_.query.get<uint32_t>(tiles * op_.dim / 2 * kTile);
                for (int64_t tile = 0; tile < tiles; ++tile)
                    query_pairs(from + tile * kTile * op_.dim, length - tile * kTile, op_.dim, pairs + tile * op_.dim / 2 * kTile);
                return;
            }
        }
#endif
        float* const columns = scratch_.query.get<float>(tiles * op_.dim * kLanes);
        for (int64_t tile = 0; tile < tiles; ++tile)
            rows_to_tile(from + tile * kLanes * op_.dim, op_.dim, length - tile * kLanes, op_.dim, columns + tile * op_.dim * kLanes);
    }

    // A document with kTiles tiles of the query from `tile` on.
    template <int kTiles>
    void meet(const T* document, int64_t length, int64_t tile, Floats* most) {
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (by_tiles_) {
                const uint32_t* const pairs = scratch_.query.get<uint32_t>(0) + tile * op_.dim / 2 * kTile;
                return max_products<kTiles>(document, length, op_.dim, pairs, scratch_.widened.get<BFloat16>(2 * kTile * op_.dim),
                                            scratch_.products.get<float>(4 * 256), most);
            }
        }
#endif
        const float* const columns = scratch_.query.get<float>(0) + tile * op_.dim * kLanes;
        float* const products = scratch_.products.get<float>(kTiles * kDocumentPiece * kLanes);
        for (int64_t token = 0; token < length; token += kDocumentPiece) {
            const int64_t count = std::min(kDocumentPiece, length - token);
            const float* const rows = widened(document + token * op_.dim, count);
            multiply_columns<kTiles>(rows, op_.dim, count, columns, op_.dim * kLanes, op_.dim, products, kDocumentPiece * kLanes);
            for (int v = 0; v < kTiles; ++v)
                for (int64_t i = 0; i < count; ++i) most[v] = max(load(products + (v * kDocumentPiece + i) * kLanes), most[v]);
        }
    }

    const float* widened(const T* rows, int64_t count) {
        if constexpr (std::is_same_v<T, float>) {
            return rows;
        } else {
            float* const to = scratch_.widened.get<float>(kDocumentPiece * op_.dim);
            for (int64_t i = 0; i < count * op_.dim; i += kLanes)
                store_some(to + i, load_some(rows + i, count * op_.dim - i), count * op_.dim - i);
            return to;
        }
    }

    const MaxSim<T>& op_;
    MaxSimScratch& scratch_;
    const bool by_tiles_;
    int64_t query_ = -1;  // that the scratch holds
};

// By a team of its own.
template <typename T>
void maxsim(const MaxSim<T>& op) {
    std::vector<int64_t> begins(2 * op.num_documents + 1);  // of each document, and of its query
    int64_t tokens = 0, query_tokens = 0;
    for (int64_t i = 0; i < op.num_documents; ++i) {
        begins[2 * i] = tokens;
        begins[2 * i + 1] = query_tokens;
        tokens += op.document_lens[i];
        if (op.num_queries > 1) query_tokens += op.query_lens[i];
    }
    const bool few = op.num_documents < 2 || tokens * op.dim < 16384;
#pragma omp parallel if (!few)
    {
        static thread_local MaxSimScratch scratch;
        const HeldTiles tiles(maxsim_by_tiles<T>(op.dim));
        MaxSimPairs<T> pairs(op, scratch);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < op.num_documents; ++i)
            op.scores[i] = pairs.score(op.num_queries > 1 ? i : 0, begins[2 * i + 1], i, begins[2 * i]);
    }
}

}  // namespace quire
