// The engine behind stage.h: the only file that includes llama.h.
#include "stage.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <numeric>

#include "certificate.h"
#include "chat.h"
#include "facts.h"
#include "ggml-cpu.h"
#include "llama-ext.h"
#include "llama.h"
#include "places.h"
#include "probe.h"

namespace meshnode {
namespace {

constexpr auto kKvType = GGML_TYPE_F16;

// The engine says why it fails only in its log; this keeps the errors of the call in progress.
class Log {
  public:
    static Log & get() {
        static Log log;
        return log;
    }
    void clear() {
        std::lock_guard lock(mutex_);
        text_.clear();
    }
    // What was said first, without the line's end; for people only.
    std::string first(const char * otherwise) {
        std::lock_guard lock(mutex_);
        return text_.empty() ? otherwise : text_.substr(0, text_.find('\n'));
    }

  private:
    static constexpr size_t kMost = 4096;

    Log() {
        llama_log_set(
            [](ggml_log_level level, const char * text, void * self) {
                if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
                    std::fputs(text, stderr);
                }
                if (level == GGML_LOG_LEVEL_ERROR) {
                    static_cast<Log *>(self)->add(text);
                }
            },
            this);
        llama_backend_init();
        // Steps of many positions come and go: their buffers return to the system instead of staying with the heap.
        mallopt(M_MMAP_THRESHOLD, 256 << 10);
    }
    void add(const char * text) {
        std::lock_guard lock(mutex_);
        if (text_.size() < kMost) {
            text_ += text;
        }
    }

    std::mutex  mutex_;
    std::string text_;
};

// The device that takes every layer held, if the engine was built for one and the machine has it.
ggml_backend_dev_t gpu() {
    Log::get();  // loads the backends
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
}

std::string backend() {
    std::string name = gpu() ? ggml_backend_reg_name(ggml_backend_dev_backend_reg(gpu())) : "cpu";
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
    return name;
}

// Which kernels run is a switch of the whole process.
void select_numerics(Numerics numerics) {
    static std::once_flag once;
    static Numerics selected;
    std::call_once(once, [&] {
        selected = numerics;
        ggml_cpu_set_batch_invariant(numerics == Numerics::invariant);
    });
    if (numerics != selected) {
        throw StageError("internal", "one process cannot serve both kinds of numerics");
    }
}

std::vector<Control> controls_of(const llama_vocab * vocab) {
    std::vector<Control> out;
    for (int32_t id = 0; llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE && id < llama_vocab_n_tokens(vocab); id++) {
        const auto attr = llama_vocab_get_attr(vocab, id);
        const char * text = llama_vocab_get_text(vocab, id);
        if ((attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) && text && *text) {
            out.push_back({text, id, bool(attr & LLAMA_TOKEN_ATTR_LSTRIP), bool(attr & LLAMA_TOKEN_ATTR_RSTRIP)});
        }
    }
    return out;
}

// What a slot holds: positions [0, used), all of them computed in these layers.
struct Slot {
    int32_t used = 0;
    Layers  layers;
};

class Engine final : public Stage {
  public:
    explicit Engine(const LoadOptions & options) {
        Log::get().clear();
        const FileFacts facts = read_facts(options.paths);
        if (!options.unproven) {
            check_proven(facts, options.numerics);
        }
        const Layers held = {options.layers.begin, options.layers.end < 0 ? int32_t(facts.n_layer) : options.layers.end};
        if (held.begin < 0 || held.begin >= held.end || held.end > facts.n_layer) {
            throw StageError("bad_layers", "layers " + std::to_string(held.begin) + "-" + std::to_string(held.end) +
                                               " are not a range of the model's " + std::to_string(facts.n_layer));
        }
        if (options.n_sessions < 1 || options.n_sessions > llama_max_parallel_sequences()) {
            throw StageError("bad_frame", "the number of sessions must be in [1, " +
                                              std::to_string(llama_max_parallel_sequences()) + "]");
        }
        if (options.n_ctx < 1 || options.max_step < 1 || options.n_threads < 1 || options.n_ctx > kMostCells ||
            options.max_step > kMostCells || options.n_threads > kMostThreads) {
            throw StageError("bad_frame", "context, step and threads must be positive and sane");
        }
        if (gpu() && options.numerics == Numerics::invariant) {
            throw StageError("bad_config", "this worker computes on " + backend() +
                                               ", where only fast numerics can be had, not invariant");
        }
        select_numerics(options.numerics);
        load(options);
        describe(options, facts);
    }

    const Loaded & loaded() const override { return loaded_; }

    std::vector<StepOutput> forward(std::span<const Step> steps, Layers effective) override {
        check(steps, effective);
        arrange(steps);
        std::vector<size_t> order(steps.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return stream(steps[a].slot) < stream(steps[b].slot); });

        std::vector<StepOutput> out(steps.size());
        llama_set_layer_range(context_.get(), effective.begin, effective.end);
        try {
            for (size_t first = 0; first < order.size();) {
                size_t last = first, rows = 0;
                while (last < order.size() && rows + length(steps[order[last]], effective) <= batch_) {
                    rows += length(steps[order[last++]], effective);
                }
                decode(steps, std::span(order).subspan(first, last - first), effective, out);
                first = last;
            }
        } catch (...) {
            for (const Step & step : steps) {
                if (!llama_memory_seq_rm(memory(), stream(step.slot), step.first_pos, -1)) {
                    llama_memory_seq_rm(memory(), stream(step.slot), -1, -1);  // a recurrent state cannot go back
                    slots_[step.slot].used = 0;
                }
            }
            throw;
        }
        for (const Step & step : steps) {
            slots_[step.slot].used += int32_t(length(step, effective));
            slots_[step.slot].layers = effective;
        }
        return out;
    }

    int32_t used(uint32_t slot) const override { return slots_.at(check_slot(slot)).used; }

    void truncate(uint32_t slot, int32_t keep) override {
        Slot & s = slots_[check_slot(slot)];
        if (keep < 0) {
            throw StageError("bad_frame", "a slot cannot keep a negative number of positions");
        }
        if (keep >= s.used) {
            return;
        }
        if ((keep > 0 && !truncates_) || !llama_memory_seq_rm(memory(), stream(slot), keep, -1)) {
            throw StageError("cache_miss", "the architecture can only forget a whole session");
        }
        s.used = keep;
    }

    void fork(uint32_t from, uint32_t to, int32_t keep) override {
        const Slot source = slots_[check_slot(from)];
        if (from == check_slot(to) || keep < 0 || keep > source.used) {
            throw StageError("bad_frame", "a fork keeps at most what its origin holds, in another slot");
        }
        truncate(to, 0);
        if (keep == 0) {
            return;
        }
        llama_memory_seq_cp(memory(), stream(from), stream(to), -1, -1);  // streams are copied whole
        slots_[to] = source;
        try {
            truncate(to, keep);
        } catch (...) {
            truncate(to, 0);
            throw;
        }
    }

    std::vector<int32_t> tokenize(std::string_view text, bool add_special, bool parse_special) const override {
        check_tokenizer();
        check_length(text.size());
        std::vector<int32_t> out(text.size() + 8);
        int32_t n = llama_tokenize(vocab(), text.data(), int32_t(text.size()), out.data(), int32_t(out.size()),
                                   add_special, parse_special);
        if (n < 0 && n != INT32_MIN) {
            out.resize(size_t(-n));
            n = llama_tokenize(vocab(), text.data(), int32_t(text.size()), out.data(), int32_t(out.size()), add_special,
                               parse_special);
        }
        if (n < 0) {
            throw StageError("bad_prompt", "the text cannot be tokenized");
        }
        out.resize(size_t(n));
        const int32_t bos = llama_vocab_bos(vocab());
        if (add_special && llama_vocab_get_add_bos(vocab()) && n > 1 && out[0] == bos && out[1] == bos) {
            out.erase(out.begin());  // the text brought its own
        }
        return out;
    }

    std::vector<int32_t> tokenize_chat(std::span<const Segment> segments) const override {
        check_tokenizer();
        check_length(std::accumulate(segments.begin(), segments.end(), size_t(0),
                                     [](size_t sum, const Segment & s) { return sum + s.text.size(); }));
        std::vector<int32_t> out =
            chat_tokens(segments, controls_, [&](const std::string & text) { return tokenize(text, false, false); });
        const int32_t bos = llama_vocab_bos(vocab());
        if (llama_vocab_get_add_bos(vocab()) && bos >= 0 && (out.empty() || out.front() != bos)) {
            out.insert(out.begin(), bos);
        }
        return out;
    }

    ChatFacts chat_facts() const override {
        auto text = [&](int32_t id) { return id < 0 ? "" : llama_vocab_get_text(vocab(), id); };
        const char * source = llama_model_chat_template(model_.get(), nullptr);
        ChatFacts facts{source ? source : "", text(llama_vocab_bos(vocab())), text(llama_vocab_eos(vocab())), {}};
        for (const Control & control : controls_.all()) {
            facts.controls.push_back(control.text);
        }
        return facts;
    }

    std::string piece(int32_t token) const override {
        check_token(token);
        check_tokenizer();
        std::string out(64, '\0');
        int32_t n = llama_token_to_piece(vocab(), token, out.data(), int32_t(out.size()), 0, false);
        if (n < 0) {
            out.resize(size_t(-n));
            n = llama_token_to_piece(vocab(), token, out.data(), int32_t(out.size()), 0, false);
        }
        out.resize(size_t(std::max(n, 0)));
        return out;
    }

    bool is_end(int32_t token) const override {
        check_token(token);
        check_tokenizer();
        return llama_vocab_is_eog(vocab(), token);
    }

  private:
    static constexpr uint32_t kMostCells   = 1 << 24;  // a session: keeps every product of sizes below 2^63
    static constexpr uint32_t kMostThreads = 512;      // GGML_MAX_N_THREADS
    static constexpr uint32_t kSpareFrom   = 8;        // sessions: one stream more is then at most an eighth
    static constexpr size_t   kMostText    = 1 << 20;  // bytes: of a prompt that anyone waits for

    void check_proven(const FileFacts & facts, Numerics numerics) {
        const Certificate * certificate = certificate_of(facts.architecture);
        if (!certificate) {
            throw StageError("unsupported_architecture", "architecture '" + facts.architecture + "' is refused: " +
                                                             std::string(refusal_of(facts.architecture)));
        }
        const bool invariant = numerics == Numerics::invariant;
        for (int type : facts.types) {
            if (type > 63 || !((invariant ? certificate->invariant : certificate->fast) >> type & 1)) {
                throw StageError("unproven_numerics", std::string(invariant ? "invariant" : "fast") +
                                                          " numerics are not proven for the architecture '" +
                                                          facts.architecture + "' with weights of type " +
                                                          ggml_type_name(ggml_type(type)));
            }
        }
        truncates_ = certificate->truncate;
    }

    void load(const LoadOptions & options) {
        const bool invariant = options.numerics == Numerics::invariant;

        llama_model_params mp = llama_model_default_params();
        mp.load_mode       = LLAMA_LOAD_MODE_MMAP;
        mp.n_gpu_layers    = gpu() ? INT32_MAX : 0;
        mp.use_extra_bufts = !invariant;  // repacked weights round differently
        mp.layer_begin     = options.layers.begin;
        mp.layer_end       = options.layers.end;
        mp.progress_callback = [](float, void *) { return true; };
        std::vector<const char *> paths;
        for (const std::string & path : options.paths) {
            paths.push_back(path.c_str());
        }
        model_.reset(llama_model_load_from_splits(paths.data(), paths.size(), mp));
        if (!model_) {
            throw StageError("bad_model", Log::get().first("the engine cannot load the model"));
        }

        if (llama_model_is_diffusion(model_.get()) || llama_model_has_encoder(model_.get())) {
            throw StageError("unsupported_architecture", "it does not write from left to right");
        }

        // Positions beyond those it was trained on are nonsense to a model, and a fatal error to some.
        const int32_t trained = llama_model_n_ctx_train(model_.get());
        const uint32_t cells  = trained > 0 ? std::min(options.n_ctx, uint32_t(trained)) : options.n_ctx;

        // A stream to spare lets full ones change places. Few sessions are not worth its memory.
        const uint32_t n_streams =
            options.n_sessions + (options.n_sessions >= kSpareFrom && options.n_sessions < llama_max_parallel_sequences());
        // As many positions of each stream, or some architectures abort when the engine plans its memory.
        batch_ = (std::max(options.max_step, n_streams) + n_streams - 1) / n_streams * n_streams;
        llama_context_params cp = llama_context_default_params();
        cp.n_seq_max       = n_streams;
        cp.n_ctx           = uint32_t(std::min<uint64_t>(uint64_t(cells) * n_streams, UINT32_MAX / 2));
        cp.kv_unified      = false;  // a stream each, or neighbours change a session's bits
        cp.n_batch         = batch_;
        cp.n_ubatch        = batch_;
        cp.n_outputs_max   = n_streams;  // logits of one position a session
        cp.n_threads       = int32_t(options.n_threads);
        cp.n_threads_batch = int32_t(options.n_threads);
        cp.type_k = cp.type_v = kKvType;
        // On a CPU decode takes 1.2 to 1.4 times as long with flash attention; a prompt a tenth to a quarter less.
        cp.flash_attn_type = gpu() ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        cp.swa_full        = true;  // or a window's old cells are gone when positions are taken back
        cp.no_perf         = true;
        context_.reset(llama_init_from_model(model_.get(), cp));
        if (!context_) {
            throw refused_or("out_of_memory", "there is not enough memory for these layers, sessions and context");
        }
        batch_ = llama_n_batch(context_.get());
        slots_.resize(options.n_sessions);
        places_ = Places(options.n_sessions, n_streams);
        controls_ = Controls(controls_of(vocab()));
    }

    StageError refused_or(const char * code, const std::string & what) const {
        if (llama_model_cut_refused(model_.get())) {
            return {"unsupported_architecture", Log::get().first("the architecture cannot be cut there")};
        }
        return {code, what};
    }

    void describe(const LoadOptions & options, const FileFacts & facts) {
        const bool fast = options.numerics == Numerics::fast;
        loaded_.architecture = facts.architecture;
        loaded_.n_layer      = llama_model_n_layer(model_.get());
        loaded_.layers       = {llama_model_layer_begin(model_.get()), llama_model_layer_end(model_.get())};
        loaded_.n_embd       = llama_model_n_embd(model_.get());
        loaded_.n_vocab      = llama_vocab_n_tokens(vocab());
        loaded_.n_ctx_train  = llama_model_n_ctx_train(model_.get());
        loaded_.n_sessions   = uint32_t(slots_.size());
        loaded_.n_ctx        = llama_n_ctx_seq(context_.get());  // rounded up by the engine
        if (loaded_.n_ctx_train > 0) {
            loaded_.n_ctx = std::min(loaded_.n_ctx, uint32_t(loaded_.n_ctx_train));
        }
        loaded_.max_step     = std::min({options.max_step, batch_, loaded_.n_ctx});
        loaded_.has_template = llama_model_chat_template(model_.get(), nullptr) != nullptr;
        loaded_.tensor_bytes = llama_model_size(model_.get());
        for (const auto & [type, bytes] : llama_get_memory_breakdown(context_.get())) {
            loaded_.kv_bytes += bytes.context;
        }
        const auto positions = llama_model_rope_type(model_.get());
        const bool planes = positions == LLAMA_ROPE_TYPE_MROPE || positions == LLAMA_ROPE_TYPE_IMROPE;
        loaded_.certificate = std::string("{\"invariant\":") + (fast ? "false" : "true") + ",\"planes\":" +
                              (planes ? "4" : "1") + ",\"truncate\":\"" + (truncates_ ? "any" : "none") + "\"}";
        const char * rope   = facts.rope_short_to == 0 ? "" :
                              int64_t(llama_n_ctx_seq(context_.get())) > facts.rope_short_to ? "long" : "short";
        const Numbers numbers{options.numerics, ggml_type_name(kKvType), fast, bool(gpu()), rope, backend()};
        loaded_.recipe      = recipe(numbers);
        loaded_.fingerprint = fingerprint(facts.types, numbers);
    }

    // Everything the engine would answer with an assertion, that is the end of the process, is caught here.
    void check(std::span<const Step> steps, Layers effective) const {
        const Layers held = loaded_.layers;
        if (effective.begin < held.begin || effective.begin >= effective.end || effective.end > held.end) {
            throw StageError("bad_layers", "the effective range is not within the layers held");
        }
        std::vector<bool> seen(slots_.size(), false);
        for (const Step & step : steps) {
            const Slot & slot = slots_[check_slot(step.slot)];
            if (seen[step.slot]) {
                throw StageError("bad_frame", "two steps of one slot in one batch");
            }
            seen[step.slot] = true;
            check_input(step, effective);
            if (step.first_pos != slot.used) {
                throw StageError("cache_miss", "the cache ends at position " + std::to_string(slot.used) + ", not " +
                                                   std::to_string(step.first_pos));
            }
            if (slot.used > 0 && (effective.begin < slot.layers.begin || effective.end > slot.layers.end)) {
                throw StageError("cache_miss", "earlier positions were computed in fewer layers");
            }
            if (length(step, effective) > loaded_.n_ctx - size_t(slot.used)) {
                throw StageError("context_exceeded", "the step does not fit the session's " +
                                                         std::to_string(loaded_.n_ctx) + " positions");
            }
        }
    }

    void check_input(const Step & step, Layers effective) const {
        const size_t width = size_t(loaded_.n_embd);
        const bool head = effective.begin == 0;
        if (head ? !step.residual.empty() : !step.tokens.empty() || step.residual.size() % width != 0) {
            throw StageError("bad_frame", head ? "layer 0 takes token ids" : "these layers take whole residual rows");
        }
        const size_t n = length(step, effective);
        if (n < 1 || n > loaded_.max_step) {
            throw StageError("bad_frame", "a step carries 1 to " + std::to_string(loaded_.max_step) + " positions");
        }
        for (int32_t token : step.tokens) {
            check_token(token);
        }
        if (!std::all_of(step.residual.begin(), step.residual.end(), [](float x) { return std::abs(x) < kAbsurd; })) {
            throw StageError("bad_activation", "the residual is not finite, or absurd");
        }
    }

    void check_tokenizer() const {
        if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE) {
            throw StageError("bad_prompt", "the model has no tokenizer");
        }
    }

    static void check_length(size_t bytes) {
        if (bytes > kMostText) {
            throw StageError("bad_prompt", "the text is longer than " + std::to_string(kMostText) + " bytes");
        }
    }

    uint32_t check_slot(uint32_t slot) const {
        if (slot >= slots_.size()) {
            throw StageError("bad_frame", "there is no slot " + std::to_string(slot));
        }
        return slot;
    }

    void check_token(int32_t token) const {
        if (token < 0 || token >= loaded_.n_vocab) {
            throw StageError("bad_frame", "there is no token " + std::to_string(token));
        }
    }

    size_t length(const Step & step, Layers effective) const {
        return effective.begin == 0 ? step.tokens.size() : step.residual.size() / size_t(loaded_.n_embd);
    }

    void decode(std::span<const Step> steps, std::span<const size_t> order, Layers effective, std::vector<StepOutput> & out) {
        const bool head = effective.begin == 0, tail = effective.end == loaded_.n_layer;
        std::vector<llama_token> tokens;
        std::vector<float> residual;
        std::vector<llama_pos> positions;
        std::vector<llama_seq_id> slots;
        std::vector<int8_t> wanted;
        for (size_t i : order) {
            const Step & step = steps[i];
            const size_t n = length(step, effective);
            if (head) {
                tokens.insert(tokens.end(), step.tokens.begin(), step.tokens.end());
            }
            residual.insert(residual.end(), step.residual.begin(), step.residual.end());
            slots.insert(slots.end(), n, stream(step.slot));
            for (size_t k = 0; k < n; k++) {
                positions.push_back(step.first_pos + llama_pos(k));
            }
            wanted.insert(wanted.end(), n, 0);
            wanted.back() = tail && step.want_logits;
        }
        const size_t rows = positions.size();
        tokens.resize(rows, 0);  // beside a residual they are ignored
        std::vector<int32_t> ones(rows, 1);
        std::vector<llama_seq_id *> ids(rows);
        for (size_t k = 0; k < rows; k++) {
            ids[k] = &slots[k];
        }

        Log::get().clear();
        const int32_t status = llama_decode(context_.get(), {int32_t(rows), tokens.data(), head ? nullptr : residual.data(),
                                                             positions.data(), ones.data(), ids.data(), wanted.data()});
        if (status == 1) {
            throw StageError("context_exceeded", "the cache has no cells left for the step");
        }
        if (status != 0) {
            throw refused_or("internal", Log::get().first("the engine failed to compute"));
        }

        const float * leaving = llama_get_residual(context_.get());  // waits for the computation
        size_t row = 0;
        for (size_t i : order) {
            const size_t n = length(steps[i], effective);
            if (!tail) {
                out[i].residual.assign(leaving + row * size_t(loaded_.n_embd), leaving + (row + n) * size_t(loaded_.n_embd));
            } else if (steps[i].want_logits) {
                const float * logits = llama_get_logits_ith(context_.get(), int32_t(row + n - 1));
                out[i].logits.assign(logits, logits + loaded_.n_vocab);
            }
            row += n;
        }
    }

    // Moves the sessions of a batch side by side where that pays.
    void arrange(std::span<const Step> steps) {
        std::vector<uint32_t> active;
        for (const Step & step : steps) {
            active.push_back(step.slot);
        }
        std::vector<bool> filled;
        for (const Slot & slot : slots_) {
            filled.push_back(slot.used > 0);
        }
        for (const Places::Move & move : places_.arrange(active, filled)) {
            llama_memory_seq_rm(memory(), llama_seq_id(move.to), -1, -1);
            llama_memory_seq_cp(memory(), llama_seq_id(move.from), llama_seq_id(move.to), -1, -1);
            llama_memory_seq_rm(memory(), llama_seq_id(move.from), -1, -1);
        }
    }

    llama_seq_id stream(uint32_t slot) const { return llama_seq_id(places_.stream(slot)); }
    llama_memory_t memory() const { return llama_get_memory(context_.get()); }
    const llama_vocab * vocab() const { return llama_model_get_vocab(model_.get()); }

    std::unique_ptr<llama_model, decltype(&llama_model_free)> model_{nullptr, llama_model_free};
    std::unique_ptr<llama_context, decltype(&llama_free)> context_{nullptr, llama_free};
    Controls controls_;
    std::vector<Slot> slots_;
    Places places_{0, 0};
    uint32_t batch_ = 0;  // rows a call of the engine
    bool truncates_ = true;
    Loaded loaded_;
};

}  // namespace

std::unique_ptr<Stage> Stage::open(const LoadOptions & options) {
    return std::make_unique<Engine>(options);
}

}  // namespace meshnode
