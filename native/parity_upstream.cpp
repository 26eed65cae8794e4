// parity_upstream MODEL invariant|fast COUNT < prompts
//
// What greedy prints, from the engine as it is upstream. It has no switch for kernels that round differently with the
// number of columns, but with one position a call those never run: so "invariant" feeds the prompt one by one.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"
#include "sha256.h"

int main(int argc, char ** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: parity_upstream MODEL invariant|fast COUNT < prompts\n");
        return 2;
    }
    const bool fast = std::string(argv[2]) == "fast";
    const size_t chunk = fast ? 64 : 1;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = fast;
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
        std::printf("FAIL the model cannot be loaded\n");
        return 1;
    }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx           = 1024;
    cp.n_seq_max       = 1;
    cp.kv_unified      = false;
    cp.n_batch         = 64;
    cp.n_ubatch        = 64;
    cp.n_threads       = 2;
    cp.n_threads_batch = 2;
    cp.flash_attn_type = fast ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, cp);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    for (std::string line; context && std::getline(std::cin, line);) {
        std::istringstream in(line);
        std::vector<llama_token> next;
        for (llama_token id; in >> id;) {
            next.push_back(id);
        }
        llama_memory_clear(llama_get_memory(context), true);
        meshnode::Sha256 hash;
        for (int k = 0; k < std::atoi(argv[3]); k++) {
            while (!next.empty()) {
                const size_t n = std::min(next.size(), chunk);
                if (llama_decode(context, llama_batch_get_one(next.data(), int32_t(n))) != 0) {
                    std::printf("FAIL the engine cannot compute\n");
                    return 1;
                }
                next.erase(next.begin(), next.begin() + std::ptrdiff_t(n));
            }
            const float * logits = llama_get_logits_ith(context, -1);
            hash.update(logits, size_t(n_vocab) * sizeof(float));
            next = {llama_token(std::max_element(logits, logits + n_vocab) - logits)};
            std::printf("%d ", next[0]);
        }
        std::printf("%s\n", hash.hex().c_str());
    }
    llama_free(context);
    llama_model_free(model);
}
