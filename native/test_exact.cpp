// test_exact MODEL [--jobs N] [--prompt N] [--fast] [--unproven] [--certify] [--cut C]...
//
// Whatever the cut, a chain of two stages computes the very bits of the whole model: at every cut C of the model (or
// at those given), in one prefill, in a chunked prefill and in decode, the residual of [0, C) and the logits of
// [0, C) + [C, n) are compared with those of the whole model, and the maximum absolute difference has to be 0.
// Then: effective ranges within one holding, a prompt at once against position by position, and sessions computed
// together against each of them alone.
//
// --certify: for the sweep over architectures. One thread each, and a last line of JSON: whether it is exact at every
// cut, whether invariant, what of a session can be kept, and what the engine said of it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "stage.h"

using namespace meshnode;

namespace {

using Values = std::vector<float>;

constexpr int kChunks[] = {6, 3, 2, 1};  // each meets kernels that take so many columns at once, or does not
constexpr int kDecode = 2;  // steps
constexpr int kStep = 64;   // positions at most

struct Arguments {
    std::string model;
    int         jobs    = 2;  // cuts tried at once
    int         prompt  = 12;
    Numerics    numerics = Numerics::invariant;
    bool             unproven = false;
    bool             certify  = false;
    std::vector<int> cuts;
};

// The largest absolute difference; infinite when shapes differ or something is not a number.
double difference(const Values & a, const Values & b) {
    if (a.size() != b.size() || a.empty()) {
        return std::numeric_limits<double>::infinity();
    }
    double most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        const double d = std::fabs(double(a[i]) - double(b[i]));
        most = d <= most ? most : std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    }
    return most;
}

class Report {
  public:
    void note(const std::string & what, double d) {
        std::lock_guard lock(mutex_);
        most_ = std::max(most_, d);
        count_++;
        if (d != 0) {
            failed_++;
            std::printf("FAIL %s: max |difference| %g\n", what.c_str(), d);
        }
    }
    int failed() const { return failed_; }
    double most() const { return std::isfinite(most_) ? most_ : 1e9; }  // JSON has no infinity
    int finish() const {
        std::printf("%s: %d comparisons, max |difference| %g\n", failed_ ? "FAIL" : "ok", count_, most_);
        return failed_ || count_ == 0 ? 1 : 0;
    }

  private:
    std::mutex mutex_;
    double most_ = 0;
    int count_ = 0, failed_ = 0;
};

std::unique_ptr<Stage> open(const Arguments & args, Layers layers, uint32_t threads = 1, uint32_t sessions = 2,
                            uint32_t n_ctx = 256) {
    LoadOptions options;
    options.paths       = {args.model};
    options.layers     = layers;
    options.n_sessions = sessions;
    options.n_ctx      = n_ctx;
    options.max_step   = kStep;
    options.n_threads  = threads;
    options.numerics   = args.numerics;
    options.unproven   = args.unproven;
    return Stage::open(options);
}

// The tokens at positions [first, first + n) of a made-up session.
struct Text {
    std::vector<int32_t> ids;
    Text(const Stage & stage, int session, int first, int n) {
        for (int i = first; i < first + n; i++) {
            ids.push_back((100 + session * 131 + i * 7) % stage.loaded().n_vocab);
        }
    }
};

// What a session gave so far: residuals of all positions, and the logits after each step.
struct Trace {
    Values residual;
    std::vector<Values> logits;
};

// Runs the text of args.prompt positions in two slots, whole and in chunks, then decodes both at once.
// input: at layer 0 nothing, else the residuals of all positions of both.
std::vector<Trace> run(Stage & stage, Layers range, const Arguments & args, const std::vector<Trace> * input) {
    std::vector<Trace> out(2);
    const bool head = range.begin == 0;
    const size_t width = size_t(stage.loaded().n_embd);
    for (uint32_t slot = 0; slot < 2; slot++) {
        stage.truncate(slot, 0);
    }
    auto push = [&](std::vector<uint32_t> slots, int first, int n) {
        const Text text(stage, 0, first, n);
        std::vector<Step> steps;
        for (uint32_t slot : slots) {
            Step step;
            step.slot = slot;
            step.first_pos = first;
            step.want_logits = true;
            if (head) {
                step.tokens = text.ids;
            } else {
                step.residual = std::span((*input)[slot].residual).subspan(size_t(first) * width, size_t(n) * width);
            }
            steps.push_back(step);
        }
        const std::vector<StepOutput> got = stage.forward(steps, range);
        for (size_t i = 0; i < slots.size(); i++) {
            Trace & trace = out[slots[i]];
            trace.residual.insert(trace.residual.end(), got[i].residual.begin(), got[i].residual.end());
            if (!got[i].logits.empty()) {
                trace.logits.push_back(got[i].logits);
            }
        }
    };
    push({0}, 0, args.prompt);
    for (int first = 0, i = 0; first < args.prompt; i++) {
        const int n = std::min(kChunks[i % std::size(kChunks)], args.prompt - first);
        push({1}, first, n);
        first += n;
    }
    for (int k = 0; k < kDecode; k++) {
        push({0, 1}, args.prompt + k, 1);
    }
    return out;
}

// The residuals of the text's first n positions, in slot 0, chunk by chunk.
Values prefill(Stage & stage, Layers range, int n, int chunk = kStep) {
    Values out;
    stage.truncate(0, 0);
    for (int first = 0; first < n; first += chunk) {
        const Text text(stage, 0, first, std::min(chunk, n - first));
        Step step;
        step.first_pos = first;
        step.tokens    = text.ids;
        const StepOutput got = stage.forward(std::span(&step, 1), range)[0];
        out.insert(out.end(), got.residual.begin(), got.residual.end());
    }
    return out;
}

void compare_logits(Report & report, const std::string & what, const std::vector<Trace> & a, const std::vector<Trace> & b) {
    const char * names[] = {" prefill", " chunked prefill"};
    for (int slot = 0; slot < 2; slot++) {
        if (a[slot].logits.size() != b[slot].logits.size()) {
            report.note(what + ": number of steps", std::numeric_limits<double>::infinity());
            continue;
        }
        for (size_t i = 0; i < a[slot].logits.size(); i++) {
            report.note(what + names[slot] + ", logits of step " + std::to_string(i),
                        difference(a[slot].logits[i], b[slot].logits[i]));
        }
    }
}

void compare_cut(Report & report, const Arguments & args, Stage & whole, const std::vector<Trace> & reference, int cut) {
    const int n = whole.loaded().n_layer;
    const std::string name = "cut " + std::to_string(cut);

    const std::vector<Trace> boundary = run(*open(args, {0, cut}), {0, cut}, args, nullptr);
    compare_logits(report, name, run(*open(args, {cut, n}), {cut, n}, args, &boundary), reference);

    // The same cut as an effective range of the whole holding.
    const Values inner = prefill(whole, {0, cut}, args.prompt);
    report.note(name + " residual", difference(inner, Values(boundary[0].residual.begin(),
                                                             boundary[0].residual.begin() + std::ptrdiff_t(inner.size()))));
}

// Cuts side by side, each job with a whole model of its own. Jobs have one thread each and the reference has two: the
// number of threads must not matter either.
void compare_cuts(Report & report, const Arguments & args, const std::vector<Trace> & reference, const std::vector<int> & cuts) {
    std::atomic<size_t> next = 0;
    std::vector<std::future<void>> jobs;
    for (int j = 0; j < args.jobs; j++) {
        jobs.push_back(std::async(std::launch::async, [&] {
            auto whole = open(args, {0, -1});
            for (size_t i; (i = next++) < cuts.size();) {
                compare_cut(report, args, *whole, reference, cuts[i]);
            }
        }));
    }
    for (std::future<void> & job : jobs) {
        job.get();
    }
}

// Three effective ranges of one holding after each other.
void compare_inner(Report & report, const Arguments & args, Stage & whole, const std::vector<Trace> & reference) {
    const int n = whole.loaded().n_layer, a = n / 3, b = a + 1;
    if (a < 1 || b >= n) {
        return;
    }
    const std::vector<Trace> x = run(whole, {0, a}, args, nullptr);
    const std::vector<Trace> y = run(whole, {a, b}, args, &x);
    compare_logits(report, "within one holding", run(whole, {b, n}, args, &y), reference);
}

// What a prompt leaves at each border, computed at once, in chunks, and position by position.
void compare_prefill(Report & report, Stage & whole, const std::vector<int> & cuts) {
    for (int cut : cuts) {
        const Values once = prefill(whole, {0, cut}, kStep);
        for (int chunk : {7, 1}) {
            report.note("cut " + std::to_string(cut) + " at once and in chunks of " + std::to_string(chunk),
                        difference(once, prefill(whole, {0, cut}, kStep, chunk)));
        }
    }
}

// Whether a session that was taken back, or forked, goes on as if it had never been longer.
void compare_kept(Report & report, Stage & whole, bool & truncates) {
    const Layers all = whole.loaded().layers;
    auto push = [&](uint32_t slot, int session, int n) {
        const Text text(whole, session, whole.used(slot), n);
        Step step;
        step.slot        = slot;
        step.first_pos   = whole.used(slot);
        step.tokens      = text.ids;
        step.want_logits = true;
        return whole.forward(std::span(&step, 1), all)[0].logits;
    };
    for (int keep : {1, 31, 33, 47}) {  // about the window of the sweep's models
        whole.truncate(0, 0);
        push(0, 0, keep);
        const Values straight = push(0, 0, 48 - keep);
        for (int more : {1, 40}) {
            whole.truncate(1, 0);
            push(1, 0, keep);
            push(1, 1, more);
            try {
                whole.truncate(1, keep);
            } catch (const StageError &) {
                truncates = false;
                continue;
            }
            report.note("truncated to " + std::to_string(keep), difference(push(1, 0, 48 - keep), straight));
        }
        whole.fork(0, 1, 48);
        report.note("forked at 48", difference(push(1, 0, 3), push(0, 0, 3)));
    }
}

// Sessions of different lengths, prefilled and decoded alone and then together, beside one that is so long that
// attention spans more cells.
void compare_sessions(Report & report, const Arguments & args) {
    constexpr int sessions = 4, steps = 6;
    const int lengths[sessions] = {31, 5, 48, 1};
    auto stage = open(args, {0, -1}, 1, 2 * sessions + 1, 512);
    const Layers all = stage->loaded().layers;

    auto forward = [&](const std::vector<uint32_t> & slots, const std::vector<Text> & texts) {
        std::vector<Step> batch(slots.size());
        for (size_t i = 0; i < slots.size(); i++) {
            batch[i].slot        = slots[i];
            batch[i].first_pos   = stage->used(slots[i]);
            batch[i].tokens      = texts[i].ids;
            batch[i].want_logits = true;
        }
        return stage->forward(batch, all);
    };
    auto text = [&](int s, int k) { return k == 0 ? Text(*stage, s, 0, lengths[s]) : Text(*stage, s, lengths[s] + k - 1, 1); };

    std::vector<std::vector<Values>> alone(sessions);
    for (int s = 0; s < sessions; s++) {
        for (int k = 0; k < steps; k++) {
            alone[s].push_back(forward({uint32_t(sessions + s)}, {text(s, k)})[0].logits);
        }
    }
    constexpr uint32_t neighbour = 2 * sessions;
    const int longer = std::min(260, int(stage->loaded().n_ctx) - steps);  // 256 cells are the least
    for (int first = 0; first < longer; first += kStep) {
        forward({neighbour}, {Text(*stage, sessions, first, std::min(kStep, longer - first))});
    }
    for (int k = 0; k < steps; k++) {
        std::vector<uint32_t> slots = {neighbour};
        std::vector<Text> texts = {Text(*stage, sessions, longer + k, 1)};
        for (int s = sessions - 1; s >= 0; s--) {  // the order of the steps must not matter
            slots.push_back(uint32_t(s));
            texts.push_back(text(s, k));
        }
        const std::vector<StepOutput> got = forward(slots, texts);
        for (int s = 0; s < sessions; s++) {
            report.note("session " + std::to_string(s) + " beside others, step " + std::to_string(k),
                        difference(got[size_t(sessions - s)].logits, alone[s][size_t(k)]));
        }
    }
}

int certify(const Arguments & args, const std::vector<int> & cuts, Stage & whole, const std::vector<Trace> & reference) {
    Report exact, kept, invariant;
    bool truncates = true;
    compare_cuts(exact, args, reference, cuts);
    compare_inner(exact, args, whole, reference);
    compare_kept(kept, whole, truncates);
    if (args.numerics == Numerics::invariant) {
        compare_prefill(invariant, whole, cuts);
        compare_sessions(invariant, args);
    }
    const Loaded & loaded = whole.loaded();
    std::printf("{\"architecture\": \"%s\", \"certificate\": %s, \"exact\": %s, \"invariant\": %s, \"drift\": %g, \"kept\": %s, \"truncates\": %s}\n",
                loaded.architecture.c_str(), loaded.certificate.c_str(), exact.failed() ? "false" : "true",
                invariant.failed() ? "false" : "true", invariant.most(), kept.failed() ? "false" : "true", truncates ? "true" : "false");
    return exact.failed() || kept.failed() ? 1 : 0;
}

Arguments parse(int argc, char ** argv) {
    Arguments args;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        auto number = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
        if (arg == "--jobs") {
            args.jobs = std::max(1, number());
        } else if (arg == "--prompt") {
            args.prompt = number();
        } else if (arg == "--fast") {
            args.numerics = Numerics::fast;
        } else if (arg == "--unproven") {
            args.unproven = true;
        } else if (arg == "--certify") {
            args.certify = args.unproven = true;
            args.jobs = 1;
        } else if (arg == "--cut") {
            args.cuts.push_back(number());
        } else {
            args.model = arg;
        }
    }
    if (args.model.empty() || args.prompt < 1 || args.prompt > kStep) {
        std::fprintf(stderr, "usage: test_exact MODEL [--jobs N] [--prompt 1..64] [--fast] [--unproven] [--certify] [--cut C]...\n");
        std::exit(2);
    }
    return args;
}

}  // namespace

int main(int argc, char ** argv) {
    const Arguments args = parse(argc, argv);
    Report report;
    try {
        auto whole = open(args, {0, -1}, args.certify ? 1 : 2);
        const Loaded & loaded = whole->loaded();
        std::printf("%s, %d layers, %s\nfingerprint %s\n", loaded.architecture.c_str(), loaded.n_layer, loaded.recipe.c_str(),
                    loaded.fingerprint.c_str());
        const std::vector<Trace> reference = run(*whole, loaded.layers, args, nullptr);
        std::vector<int> cuts = args.cuts;
        for (int cut = 1; args.cuts.empty() && cut < loaded.n_layer; cut++) {
            cuts.push_back(cut);
        }
        if (args.certify) {
            return certify(args, cuts, *whole, reference);
        }
        compare_cuts(report, args, reference, cuts);
        compare_inner(report, args, *whole, reference);
        if (args.numerics == Numerics::invariant) {  // the fast kernels do not promise it
            compare_prefill(report, *whole, {loaded.n_layer - 1});
            whole.reset();
            compare_sessions(report, args);
        }
    } catch (const StageError & error) {
        std::printf("FAIL %s: %s\n", error.code.c_str(), error.what());
        return 1;
    }
    return report.finish();
}
