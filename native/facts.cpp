#include "facts.h"

#include <memory>
#include <string_view>

#include "gguf.h"
#include "stage.h"

namespace meshnode {
namespace {

constexpr int64_t kMostLayers = 512;  // LLAMA_MAX_LAYERS

int64_t read_number(const gguf_context * file, const std::string & name) {
    const int64_t key = gguf_find_key(file, name.c_str());
    return key >= 0 && gguf_get_kv_type(file, key) == GGUF_TYPE_UINT32 ? gguf_get_val_u32(file, key) : 0;
}

struct File {
    explicit File(const std::string & path) {
        gguf.reset(gguf_init_from_file(path.c_str(), {true, &opened}));
        tensors.reset(opened);
        if (!gguf) {
            throw StageError("bad_model", "the file is no GGUF model");
        }
    }

    ggml_context * opened = nullptr;
    std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf{nullptr, gguf_free};
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors{nullptr, ggml_free};
};

void describe(const gguf_context * file, FileFacts & facts) {
    const int64_t key = gguf_find_key(file, "general.architecture");
    if (key < 0 || gguf_get_kv_type(file, key) != GGUF_TYPE_STRING) {
        throw StageError("bad_model", "the file does not name its architecture");
    }
    facts.architecture = gguf_get_val_str(file, key);
    // Blocks that only predict further tokens follow the layers.
    facts.n_layer = read_number(file, facts.architecture + ".block_count") -
                    read_number(file, facts.architecture + ".nextn_predict_layers");
    if (facts.n_layer < 1 || facts.n_layer > kMostLayers) {
        throw StageError("bad_model", "the file does not say how many layers it has");
    }
    const int64_t original = read_number(file, facts.architecture + ".rope.scaling.original_context_length");
    facts.rope_short_to    = original ? original : read_number(file, facts.architecture + ".context_length");
}

}  // namespace

FileFacts read_facts(const std::vector<std::string> & paths) {
    FileFacts facts;
    bool has_two = false;
    for (const std::string & path : paths) {
        const File file(path);
        if (facts.n_layer == 0) {
            describe(file.gguf.get(), facts);
        }
        for (int64_t i = 0; i < gguf_get_n_tensors(file.gguf.get()); i++) {
            const std::string_view name = gguf_get_tensor_name(file.gguf.get(), i);
            facts.types.insert(gguf_get_tensor_type(file.gguf.get(), i));
            has_two = has_two || name.find("rope_factors_long") != std::string_view::npos;
        }
    }
    facts.rope_short_to = has_two ? facts.rope_short_to : 0;
    return facts;
}

}  // namespace meshnode
