#include "facts.h"

#include <memory>

#include "gguf.h"
#include "stage.h"

namespace meshnode {
namespace {

constexpr int64_t kMostLayers = 512;  // LLAMA_MAX_LAYERS

int64_t read_number(const gguf_context * file, const std::string & name) {
    const int64_t key = gguf_find_key(file, name.c_str());
    return key >= 0 && gguf_get_kv_type(file, key) == GGUF_TYPE_UINT32 ? gguf_get_val_u32(file, key) : 0;
}

}  // namespace

FileFacts read_facts(const std::string & path) {
    ggml_context * tensors = nullptr;
    std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_from_file(path.c_str(), {true, &tensors}), gguf_free);
    std::unique_ptr<ggml_context, decltype(&ggml_free)> keep(tensors, ggml_free);
    if (!file) {
        throw StageError("bad_model", "the file is no GGUF model");
    }
    FileFacts facts;
    const int64_t key = gguf_find_key(file.get(), "general.architecture");
    if (key < 0 || gguf_get_kv_type(file.get(), key) != GGUF_TYPE_STRING) {
        throw StageError("bad_model", "the file does not name its architecture");
    }
    facts.architecture = gguf_get_val_str(file.get(), key);
    // Blocks that only predict further tokens follow the layers.
    facts.n_layer = read_number(file.get(), facts.architecture + ".block_count") -
                    read_number(file.get(), facts.architecture + ".nextn_predict_layers");
    if (facts.n_layer < 1 || facts.n_layer > kMostLayers) {
        throw StageError("bad_model", "the file does not say how many layers it has");
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); i++) {
        facts.types.insert(gguf_get_tensor_type(file.get(), i));
    }
    return facts;
}

}  // namespace meshnode
