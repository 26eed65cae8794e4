#include "probe.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "sha256.h"

#ifndef MESHNODE_ENGINE_PIN
#define MESHNODE_ENGINE_PIN "unknown"
#endif
#ifndef MESHNODE_ENGINE_BUILD
#define MESHNODE_ENGINE_BUILD "unknown"
#endif
#ifndef MESHNODE_ENGINE_PATCHES
#define MESHNODE_ENGINE_PATCHES "unknown"
#endif

namespace meshnode {
namespace {

constexpr int64_t kWidth = 512;  // a multiple of every block size
constexpr int64_t kRows  = 16;
// The number of columns decides which kernel runs: one, a few, enough for the tiled ones.
constexpr int64_t kColumns[] = {1, 3, 16};

class Random {
  public:
    // Uniform in [-1, 1), a multiple of 2^-23: the same on every machine.
    float next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return float(int32_t(state_ >> 40) - (1 << 23)) / float(1 << 23);
    }
    std::vector<float> take(size_t n) {
        std::vector<float> out(n);
        for (float & x : out) {
            x = next();
        }
        return out;
    }

  private:
    uint64_t state_ = 20260101;
};

struct Input {
    ggml_tensor * tensor;
    std::vector<uint8_t> data;
};

using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Buffer  = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

Context new_context() {
    return {ggml_init({2048 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}), ggml_free};
}

bool is_weight(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || ggml_is_quantized(type);
}

// Types whose quantizer searches a grid: building its tables takes seconds, and some need an importance matrix.
bool is_grid(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ1_S: case GGML_TYPE_IQ1_M: case GGML_TYPE_IQ2_XXS: case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S: case GGML_TYPE_IQ3_XXS: case GGML_TYPE_IQ3_S: return true;
        default: return false;
    }
}

class Probe {
  public:
    // repack: weights lie as they do in a model that is loaded so.
    Probe(ggml_backend_dev_t device, bool repack) : device_(device) {
        graph_ = ggml_new_graph(c());
        auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
        for (auto * type = repack && extra ? extra(device) : nullptr; type && *type; type++) {
            extra_.emplace_back(*type, new_context());
        }
    }

    ggml_context * c() { return context_.get(); }

    ggml_tensor * input(ggml_type type, int64_t n0, int64_t n1, int64_t n2 = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(c(), type, n0, n1, n2);
        fill(t);
        return t;
    }

    // A product of a weight [kWidth, kRows] and n columns.
    void product(ggml_type type, int64_t n) {
        ggml_tensor * x = input(GGML_TYPE_F32, kWidth, n);
        ggml_tensor * w = ggml_new_tensor_2d(home_of(type, n), type, kWidth, kRows);
        fill(w);
        output(ggml_mul_mat(c(), w, x));
    }

    ggml_tensor * positions(std::vector<int32_t> values) {
        ggml_tensor * t = ggml_new_tensor_1d(c(), GGML_TYPE_I32, int64_t(values.size()));
        const auto * bytes = reinterpret_cast<const uint8_t *>(values.data());
        inputs_.push_back({t, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(t))});
        return t;
    }

    void output(ggml_tensor * t) {
        ggml_set_output(t);
        ggml_build_forward_expand(graph_, t);
        outputs_.push_back(t);
    }

    std::string run() {
        std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend(ggml_backend_dev_init(device_, nullptr), ggml_backend_free);
        if (!backend) {
            throw std::bad_alloc();
        }
        std::vector<Buffer> buffers;
        buffers.emplace_back(ggml_backend_alloc_ctx_tensors(c(), backend.get()), ggml_backend_buffer_free);
        for (const auto & [type, context] : extra_) {
            if (ggml_get_first_tensor(context.get())) {
                buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), type), ggml_backend_buffer_free);
            }
        }
        for (const Buffer & buffer : buffers) {
            if (!buffer) {
                throw std::bad_alloc();
            }
        }
        for (const Input & in : inputs_) {
            ggml_backend_tensor_set(in.tensor, in.data.data(), 0, in.data.size());
        }
        if (ggml_backend_is_cpu(backend.get())) {
            ggml_backend_cpu_set_n_threads(backend.get(), 1);
        }
        if (ggml_backend_graph_compute(backend.get(), graph_) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the probe could not be computed");
        }
        Sha256 hash;
        std::vector<uint8_t> bytes;
        for (const ggml_tensor * t : outputs_) {
            bytes.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
            hash.update(bytes.data(), bytes.size());
        }
        return hash.hex();
    }

  private:
    // Of the weights of a type: where the engine would put them.
    ggml_context * home_of(ggml_type type, int64_t n) {
        for (const auto & [buffer_type, context] : extra_) {
            const Context scratch = new_context();
            ggml_tensor * w  = ggml_new_tensor_2d(scratch.get(), type, kWidth, kRows);
            ggml_tensor * op = ggml_mul_mat(scratch.get(), w, ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, kWidth, n));
            const Buffer empty(ggml_backend_buft_alloc_buffer(buffer_type, 0), ggml_backend_buffer_free);
            w->buffer = empty.get();
            if (ggml_backend_dev_supports_op(device_, op)) {
                return context.get();
            }
        }
        return c();
    }

    void fill(ggml_tensor * t) {
        const std::vector<float> values = random_.take(size_t(ggml_nelements(t)));
        std::vector<uint8_t> data(ggml_nbytes(t));
        if (t->type == GGML_TYPE_F32) {
            std::memcpy(data.data(), values.data(), data.size());
        } else if (is_grid(t->type)) {
            fill_blocks(t->type, data, values);
        } else {
            ggml_quantize_chunk(t->type, values.data(), data.data(), 0, ggml_nelements(t) / t->ne[0], t->ne[0], nullptr);
        }
        inputs_.push_back({t, std::move(data)});
    }

    // Any bytes are valid blocks of these types, but for the scale, an f16: here 2^-6.
    static void fill_blocks(ggml_type type, std::vector<uint8_t> & data, const std::vector<float> & values) {
        constexpr uint16_t scale = 0x2400;
        for (size_t i = 0; i < data.size(); i++) {
            data[i] = uint8_t(int32_t(values[i] * float(1 << 23)) >> 8);
        }
        for (size_t block = 0; block < data.size(); block += ggml_type_size(type)) {
            if (type != GGML_TYPE_IQ1_M) {
                std::memcpy(&data[block], &scale, sizeof(scale));
                continue;
            }
            for (size_t part = 0; part < 4; part++) {  // a digit of it on top of each of the last four words
                uint8_t & top = data[block + ggml_type_size(type) - 8 + 2 * part + 1];
                top = uint8_t((top & 0x0f) | (scale >> 4 * part & 0xf) << 4);
            }
        }
    }

    ggml_backend_dev_t device_;
    Context context_ = new_context();
    std::vector<std::pair<ggml_backend_buffer_type_t, Context>> extra_;  // what repacks
    ggml_cgraph * graph_;
    Random random_;
    std::vector<Input> inputs_;
    std::vector<ggml_tensor *> outputs_;
};

void attention(Probe & p, int64_t n, bool flash) {
    constexpr int64_t head = 64, heads = 2, cells = 256;
    ggml_tensor * q = p.input(GGML_TYPE_F32, head, n, heads);
    ggml_tensor * k = p.input(GGML_TYPE_F16, head, cells, heads);
    if (flash) {
        ggml_tensor * v = p.input(GGML_TYPE_F16, head, cells, heads);
        p.output(ggml_flash_attn_ext(p.c(), q, k, v, nullptr, 0.125f, 0.0f, 0.0f));
        return;
    }
    ggml_tensor * v      = p.input(GGML_TYPE_F16, cells, head, heads);
    ggml_tensor * scores = ggml_soft_max_ext(p.c(), ggml_mul_mat(p.c(), k, q), nullptr, 0.125f, 0.0f);
    p.output(ggml_mul_mat(p.c(), v, scores));
}

std::string json(std::string_view text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += c;
    }
    return out + '"';
}

// The CPU features that the engine was built for, such as AVX2, sorted.
std::vector<std::string> features() {
    std::vector<std::string> out;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature * f = get ? get(reg) : nullptr; f && f->name; f++) {
        const std::string value = f->value;
        if (value != "0") {
            out.push_back(value == "1" ? f->name : f->name + ("=" + value));
        }
    }
    std::sort(out.begin(), out.end());
    return out;
}

}  // namespace

std::string recipe(const Numbers & numbers) {
    auto boolean = [](bool value) { return value ? "true" : "false"; };
    std::string isa;
    for (const std::string & name : features()) {
        isa += (isa.empty() ? "" : ",") + json(name);
    }
    return "{\"backend\":" + json(numbers.backend) + ",\"build\":" + json(MESHNODE_ENGINE_BUILD) +
           ",\"engine\":" + json(MESHNODE_ENGINE_PIN) + ",\"flash_attention\":" + boolean(numbers.flash_attention) +
           ",\"isa\":[" + isa + "],\"kv\":" + json(numbers.kv) +
           ",\"numerics\":" + json(numbers.numerics == Numerics::invariant ? "invariant" : "fast") +
           ",\"patches\":" + json(MESHNODE_ENGINE_PATCHES) + ",\"repack\":" + boolean(numbers.repack) +
           (numbers.rope.empty() ? "" : ",\"rope\":" + json(numbers.rope)) + "}";
}

std::string fingerprint(const std::set<int> & types, const Numbers & numbers) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(
        numbers.backend == "cpu" ? GGML_BACKEND_DEVICE_TYPE_CPU : GGML_BACKEND_DEVICE_TYPE_GPU);
    Probe p(device, numbers.repack);
    for (int type : types) {
        for (int64_t n : kColumns) {
            if (is_weight(ggml_type(type))) {
                p.product(ggml_type(type), n);
            }
        }
    }
    for (int64_t n : kColumns) {
        ggml_tensor * x = p.input(GGML_TYPE_F32, kWidth, n);
        p.output(ggml_rms_norm(p.c(), x, 1e-5f));
        p.output(ggml_norm(p.c(), x, 1e-5f));
        p.output(ggml_gelu(p.c(), x));
        p.output(ggml_swiglu_split(p.c(), x, p.input(GGML_TYPE_F32, kWidth, n)));
        attention(p, n, numbers.flash_attention);
    }
    for (int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
        ggml_tensor * x = p.input(GGML_TYPE_F32, 64, 2, 3);
        p.output(ggml_rope_ext(p.c(), x, p.positions({0, 7, 4099}), nullptr, 64, mode, 8192, 10000.0f, 1.0f, 0.0f, 1.0f,
                               32.0f, 1.0f));
    }
    return p.run();
}

}  // namespace meshnode
