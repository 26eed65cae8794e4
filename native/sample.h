// Which token comes next: a pure function, so that another tail that is given the history continues the same text.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace meshnode {

// Every parameter is at its neutral value by default: greedy, nothing filtered, nothing penalised.
struct Sampling {
    double   temperature       = 0;   // 0: the highest logit, the lowest id among equals
    uint32_t top_k             = 0;   // 0: off
    double   top_p             = 1;
    double   min_p             = 0;
    double   repeat_penalty    = 1;
    uint32_t repeat_last_n     = 64;  // the window of all three penalties; 0: none, 2^32 - 1: the whole history
    double   presence_penalty  = 0;
    double   frequency_penalty = 0;
    uint64_t seed              = 0;

    bool valid() const;
};

// Philox4x32-10 (Salmon et al., 2011).
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// In [0, 1), of 53 bits, the same for the same arguments everywhere.
double uniform(uint64_t seed, uint64_t position);

// logits: [n_vocab], one per id; history: every token before position. Filters in the order penalties, top_k, top_p,
// min_p, temperature. Throws StageError bad_activation when a logit is NaN or +inf, or all are -inf.
int32_t sample(std::span<const float> logits, std::span<const int32_t> history, const Sampling & sampling,
               uint64_t position);

}  // namespace meshnode
