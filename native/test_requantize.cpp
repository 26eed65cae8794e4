// test_requantize IN OUT TYPE...
//
// Writes a model's weights anew in a type, or in several by turns, with the quantizer that people use; an importance
// of one everywhere stands in for a measured one. A type that does not fit a tensor's rows gives way to one that does.
// One expert of several is used, and an indexer selects few positions, so that what depends on choices is tried.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <strings.h>
#include <vector>

#include "gguf.h"
#include "llama.h"

namespace {

ggml_type type_of(const char * name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known && strcasecmp(known, name) == 0) {
            return ggml_type(i);
        }
    }
    return GGML_TYPE_COUNT;
}

}  // namespace

int main(int argc, char ** argv) {
    std::vector<ggml_type> types;
    for (int i = 3; i < argc; i++) {
        types.push_back(type_of(argv[i]));
        if (types.back() == GGML_TYPE_COUNT) {
            std::fprintf(stderr, "there is no type %s\n", argv[i]);
            return 2;
        }
    }
    if (types.empty()) {
        std::fprintf(stderr, "usage: test_requantize IN OUT TYPE...\n");
        return 2;
    }
    ggml_context * tensors = nullptr;
    std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_from_file(argv[1], {true, &tensors}), gguf_free);
    std::unique_ptr<ggml_context, decltype(&ggml_free)> keep(tensors, ggml_free);
    if (!file) {
        return 1;
    }

    std::vector<std::string> patterns;
    std::vector<std::vector<float>> importances;
    std::vector<llama_model_imatrix_data> imatrix;
    std::vector<llama_model_tensor_override> overrides;
    size_t turn = 0;
    patterns.reserve(size_t(gguf_get_n_tensors(file.get())));
    for (ggml_tensor * t = ggml_get_first_tensor(tensors); t; t = ggml_get_next_tensor(tensors, t)) {
        if (ggml_n_dims(t) < 2) {
            continue;
        }
        importances.emplace_back(size_t(t->ne[0] * t->ne[2]), 1.0f);
        imatrix.push_back({t->name, importances.back().data(), importances.back().size()});
        patterns.push_back("^" + std::string(t->name) + "$");
        for (size_t tries = 1; tries < types.size() && t->ne[0] % ggml_blck_size(types[turn % types.size()]) != 0; tries++) {
            turn++;
        }
        overrides.push_back({patterns.back().c_str(), types[turn++ % types.size()]});
    }
    imatrix.push_back({nullptr, nullptr, 0});
    overrides.push_back({nullptr, GGML_TYPE_COUNT});

    std::vector<llama_model_kv_override> metadata;
    const std::string architecture = gguf_get_val_str(file.get(), gguf_find_key(file.get(), "general.architecture"));
    for (const auto & [name, value] : {std::pair{".expert_used_count", 1}, {".attention.indexer.top_k", 16}}) {
        const int64_t key = gguf_find_key(file.get(), (architecture + name).c_str());
        if (key >= 0 && gguf_get_kv_type(file.get(), key) == GGUF_TYPE_UINT32 && gguf_get_val_u32(file.get(), key) > 0) {
            llama_model_kv_override one = {};
            one.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
            one.val_i64 = value;
            std::strncpy(one.key, (architecture + name).c_str(), sizeof(one.key) - 1);
            metadata.push_back(one);
        }
    }
    metadata.emplace_back();

    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.nthread      = 1;
    params.ftype        = LLAMA_FTYPE_MOSTLY_Q8_0;
    params.pure         = true;
    params.imatrix      = imatrix.data();
    params.tt_overrides = overrides.data();
    params.kv_overrides = metadata.size() > 1 ? metadata.data() : nullptr;
    return llama_model_quantize(argv[1], argv[2], &params) == 0 ? 0 : 1;
}
