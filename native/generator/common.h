// Stands in for upstream's common/common.h: its generator of test models computes nothing when it writes them.
#pragma once

#include <cstdint>
#include <cstdlib>

struct llama_context;
struct llama_batch_ext;

inline void common_init() {}

struct common_batch {
    explicit common_batch(llama_context *) { std::abort(); }
    void add(int32_t, int32_t, int32_t, bool) {}
    void clear() {}
    llama_batch_ext * get() { return nullptr; }
};
