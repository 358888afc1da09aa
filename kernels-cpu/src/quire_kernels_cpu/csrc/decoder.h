// A fused decoder: all layers of a step in one call, one parallel region, a barrier between the parts of a layer.
//
// A layer is one sublayer or two: x + norm(mixer(norm(x))), then x + norm(feed_forward(norm(x))), of which any norm may be
// missing. Knows weights, the paged cache and one step's tokens; allocates nothing once it has seen its largest step.
#pragma once

#include <memory>
#include <variant>

#include "attention_part.h"
#include "feed_forward_part.h"
#include "latent_part.h"
#include "recurrent_parts.h"

namespace quire {

// to = norm(row), rounded once. With `added`, the row becomes row + added first.
template <typename T>
inline void apply_norm(const NormArgument& norm, T* to, T* row, const T* added, int64_t size) {
    switch (static_cast<NormKind>(norm.kind)) {
        case NormKind::rms: return rms_norm(to, row, added, norm.weight, size, norm.eps);
        case NormKind::layer:
            if (added) add_row(row, added, size);
            return layer_norm(to, row, norm.weight, norm.bias, size, norm.eps);
        default:
            if (added) add_row(row, added, size);
            if (to != row) std::memcpy(to, row, size * sizeof(T));
    }
}

enum class SublayerKind : int32_t { attention, latent_attention, mamba2, gated_delta, short_conv, gated, mlp, experts };

template <typename T>
struct Sublayer {
    SublayerArgument a;
    std::variant<AttentionPart<T>, LatentAttentionPart<T>, Mamba2Part<T>, GatedDeltaPart<T>, ShortConvPart<T>, GatedPart<T>,
                 MlpPart<T>, ExpertsPart<T>> part;
    int router_input = -1;  // activations of a router, where they are others than `input`

    Sublayer(const SublayerArgument& from, Workspace<T>& work) : a(from), part(make(from, work)) {
        if (const auto* experts = std::get_if<ExpertsPart<T>>(&part); experts && experts->routed != experts->normed)
            router_input = experts->routed;
    }

    int input() const {
        return std::visit([](const auto& each) { return each.input(); }, part);
    }
    Strips<T> entry() const {
        return std::visit([](const auto& each) { return each.entry(); }, part);
    }
    void run(const Pass<T>& pass) const {
        std::visit([&](const auto& each) { each.run(pass); }, part);
    }

private:
    static decltype(part) make(const SublayerArgument& from, Workspace<T>& work) {
        switch (static_cast<SublayerKind>(from.kind)) {
            case SublayerKind::attention: return AttentionPart<T>(*static_cast<const AttentionArgument*>(from.part), work);
            case SublayerKind::latent_attention:
                return LatentAttentionPart<T>(*static_cast<const LatentAttentionArgument*>(from.part), work);
            case SublayerKind::mamba2: return Mamba2Part<T>(*static_cast<const Mamba2Argument*>(from.part), work);
            case SublayerKind::gated_delta: return GatedDeltaPart<T>(*static_cast<const GatedDeltaArgument*>(from.part), work);
            case SublayerKind::short_conv: return ShortConvPart<T>(*static_cast<const ShortConvArgument*>(from.part), work);
            case SublayerKind::gated: return GatedPart<T>(*static_cast<const GatedArgument*>(from.part), work);
            case SublayerKind::mlp: return MlpPart<T>(*static_cast<const MlpArgument*>(from.part), work);
            default: return ExpertsPart<T>(*static_cast<const ExpertsArgument*>(from.part), work);
        }
    }
};

template <typename T>
class Decoder {
public:
    const int64_t rotary_dim;  // of the step's rotations

    explicit Decoder(const DecoderArgument& from)
        : rotary_dim(from.rotary_dim), lora_(from.lora), final_norm_(from.final_norm), num_layers_(from.num_layers) {
        work_.hidden = from.hidden;
        work_.ranks = DecoderRanks(from.group);
        work_.need(kResidual, from.hidden);
        work_.need(kAdded, from.hidden);
        work_.need(kNormed, from.hidden);
        for (int64_t i = 0; i < from.num_sublayers; ++i) sublayers_.push_back(std::make_unique<Sublayer<T>>(from.sublayers[i], work_));
    }

    int64_t hidden() const { return work_.hidden; }
    const DecoderRanks& ranks() const { return work_.ranks; }

    void run(const Step<T>& step) {
        work_.begin(step, lora_ != nullptr);
        T* const residual = work_.at(kResidual);
        std::memcpy(residual, step.x, step.tokens * hidden() * sizeof(T));
        WorkQueue queue;
#pragma omp parallel
        {
            static thread_local ThreadScratch mine;
            const HeldTiles tiles(layout_for<T>(kTile, 64, WeightFormat::plain) == ActLayout::pairs);
            QueueWorker worker(queue);
            for (size_t i = 0; i < sublayers_.size() && !work_.ranks.lost(); ++i) run_sublayer(i, mine, worker);
            const Range share = my_share(step.tokens);
            for (int64_t t = share.begin; t < share.end; ++t) {
                const int64_t at = t * hidden();
                finish(*sublayers_.back(), at);
                apply_norm(final_norm_, step.hidden + at, residual + at, work_.at(kAdded) + at, hidden());
            }
            tap(num_layers_, share);
        }
    }

private:
    void run_sublayer(size_t i, ThreadScratch& mine, QueueWorker& worker) {
        const Sublayer<T>& l = *sublayers_[i];
        const bool begins_layer = i == 0 || l.a.layer != sublayers_[i - 1]->a.layer;
        norm(l, i > 0 ? sublayers_[i - 1].get() : nullptr);
        barrier();
        if (begins_layer) tap(l.a.layer, my_share(work_.tokens()));
        const Strips<T> next = sublayers_[std::min(i + 1, sublayers_.size() - 1)]->entry();
        const Step<T>& step = *work_.step;
        l.run({.work = work_,
               .mine = mine,
               .worker = worker,
               .cache = step.caches + l.a.cache,
               .group = step.groups + l.a.group,
               .sequences = step.sequences(l.a.group),
               .adapters = work_.adapted && l.a.first_lora >= 0 ? lora_ + l.a.first_lora : nullptr,
               .following = i + 1 < sublayers_.size() ? &next : nullptr});
    }

    // Copies the residual stream of some tokens where it is asked for.
    void tap(int64_t layer, Range tokens) {
        if (!work_.step->taps || !work_.step->taps[layer]) return;
        std::memcpy(static_cast<T*>(work_.step->taps[layer]) + tokens.begin * hidden(),
                    work_.at(kResidual) + tokens.begin * hidden(), (tokens.end - tokens.begin) * hidden() * sizeof(T));
    }

    // What a sublayer gave for a token, as it is to be added.
    void finish(const Sublayer<T>& l, int64_t at) {
        T* const x = work_.at(kAdded) + at;
        apply_norm(l.a.out_norm, x, x, static_cast<const T*>(nullptr), hidden());
        if (l.a.residual_factor != 1.0f) scale_row(x, l.a.residual_factor, hidden());
    }

    // residual += what the sublayer before gave, then the norm of a sublayer into its activations. Of one that stands beside
    // the other the norm comes first.
    void norm(const Sublayer<T>& l, const Sublayer<T>* before) {
        T *const residual = work_.at(kResidual), *const normed = work_.at(kNormed), *const added = work_.at(kAdded);
        const Activations& input = work_.activations[l.input()];
        const Range share = my_share(input.tiles());
        for (int64_t tile = share.begin; tile < share.end; ++tile) {
            const T* rows[kTile] = {};
            for (int i = 0; i < kTile && tile * kTile + i < work_.tokens(); ++i) {
                const int64_t at = (tile * kTile + i) * hidden();
                if (before) finish(*before, at);
                const T* const part = before ? added + at : nullptr;
                apply_norm(l.a.norm, normed + at, residual + at, l.a.parallel ? nullptr : part, hidden());
                if (l.a.parallel && part) add_row(residual + at, part, hidden());
                rows[i] = normed + at;
            }
            set_tile(input, tile, rows, 0, hidden());
            if (l.router_input >= 0) set_tile(work_.activations[l.router_input], tile, rows, 0, hidden());
        }
    }

    Workspace<T> work_;
    const LoraTable* const lora_;     // of all sublayers that may have adapters, or none
    std::vector<std::unique_ptr<Sublayer<T>>> sublayers_;
    NormArgument final_norm_;
    int64_t num_layers_;
};

}  // namespace quire
