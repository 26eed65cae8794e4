#include "probe.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "sha256.h"

#ifndef MESHNODE_ENGINE_PIN
#define MESHNODE_ENGINE_PIN "unknown"
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

class Probe {
  public:
    Probe() : context_(ggml_init({2048 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}), ggml_free) {
        graph_ = ggml_new_graph(c());
    }

    ggml_context * c() { return context_.get(); }

    ggml_tensor * input(ggml_type type, int64_t n0, int64_t n1, int64_t n2 = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(c(), type, n0, n1, n2);
        const std::vector<float> values = random_.take(size_t(n0 * n1 * n2));
        std::vector<uint8_t> data(ggml_nbytes(t));
        if (type == GGML_TYPE_F32) {
            std::memcpy(data.data(), values.data(), data.size());
        } else {
            ggml_quantize_chunk(type, values.data(), data.data(), 0, n1 * n2, n0, nullptr);
        }
        inputs_.push_back({t, std::move(data)});
        return t;
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
        std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend(ggml_backend_cpu_init(), ggml_backend_free);
        std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(
            ggml_backend_alloc_ctx_tensors(c(), backend.get()), ggml_backend_buffer_free);
        if (!backend || !buffer) {
            throw std::bad_alloc();
        }
        for (const Input & in : inputs_) {
            ggml_backend_tensor_set(in.tensor, in.data.data(), 0, in.data.size());
        }
        ggml_backend_cpu_set_n_threads(backend.get(), 1);
        if (ggml_backend_graph_compute(backend.get(), graph_) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the probe could not be computed");
        }
        Sha256 hash;
        for (const ggml_tensor * t : outputs_) {
            hash.update(t->data, ggml_nbytes(t));
        }
        return hash.hex();
    }

  private:
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context_;
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

std::string recipe(Numerics numerics, const std::string & kv, bool repack, bool flash_attention, const std::string & rope) {
    auto boolean = [](bool value) { return value ? "true" : "false"; };
    std::string isa;
    for (const std::string & name : features()) {
        isa += (isa.empty() ? "" : ",") + json(name);
    }
    return std::string("{\"backend\":\"cpu\",\"engine\":") + json(MESHNODE_ENGINE_PIN) +
           ",\"flash_attention\":" + boolean(flash_attention) + ",\"isa\":[" + isa +
           "],\"kv\":" + json(kv) +
           ",\"numerics\":" + json(numerics == Numerics::invariant ? "invariant" : "fast") +
           ",\"patches\":" + json(MESHNODE_ENGINE_PATCHES) + ",\"repack\":" + boolean(repack) + (rope.empty() ? "" : ",\"rope\":" + json(rope)) + "}";
}

std::string fingerprint(const std::set<int> & types, bool flash_attention) {
    Probe p;
    for (int type : types) {
        const auto t = ggml_type(type);
        const bool weight = t == GGML_TYPE_F32 || t == GGML_TYPE_F16 || t == GGML_TYPE_BF16 || ggml_is_quantized(t);
        if (!weight || ggml_quantize_requires_imatrix(t)) {
            continue;  // the tables that these need take seconds to build
        }
        for (int64_t n : kColumns) {
            ggml_tensor * w = p.input(t, kWidth, kRows);
            p.output(ggml_mul_mat(p.c(), w, p.input(GGML_TYPE_F32, kWidth, n)));
        }
    }
    for (int64_t n : kColumns) {
        ggml_tensor * x = p.input(GGML_TYPE_F32, kWidth, n);
        p.output(ggml_rms_norm(p.c(), x, 1e-5f));
        p.output(ggml_norm(p.c(), x, 1e-5f));
        p.output(ggml_gelu(p.c(), x));
        p.output(ggml_swiglu_split(p.c(), x, p.input(GGML_TYPE_F32, kWidth, n)));
        attention(p, n, flash_attention);
    }
    for (int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
        ggml_tensor * x = p.input(GGML_TYPE_F32, 64, 2, 3);
        p.output(ggml_rope_ext(p.c(), x, p.positions({0, 7, 4099}), nullptr, 64, mode, 8192, 10000.0f, 1.0f, 0.0f, 1.0f,
                               32.0f, 1.0f));
    }
    return p.run();
}

}  // namespace meshnode
