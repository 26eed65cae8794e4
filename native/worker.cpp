// The worker: one process around one Stage. Requests on stdin, replies on stdout, logs on stderr.
//
// A reader thread parses frames into a queue; the main thread alone changes the Stage, so a slot is freed only between
// computations. Long texts are tokenized beside it, by a third thread, in a process that can be killed.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "beside.h"
#include "frames.h"
#include "grammar.h"
#include "metered.h"
#include "queue.h"
#include "sample.h"
#include "stage.h"

#ifndef MESHNODE_ENGINE
#define MESHNODE_ENGINE "unknown"
#endif

namespace meshnode {
namespace {

constexpr int kExitFramingLost = 3;
constexpr int kExitSetup       = 4;

constexpr size_t kShortText = 4096;  // bytes: whatever is in it, it is tokenized within some ms
constexpr std::chrono::milliseconds kTokenizing{2000};

uint64_t now_ns() {
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
}

// Refuses unless its path leads, at this moment, to the very state of the file that the node identified.
void check_identity(const ModelFile & file) {
    struct stat s;
    const int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool known = fd >= 0 && ::fstat(fd, &s) == 0;
    if (fd >= 0) {
        ::close(fd);
    }
    if (!known) {
        throw StageError("unreadable", "the model's descriptor cannot be opened");
    }
    auto ns = [](const timespec & t) { return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec; };
    if (!S_ISREG(s.st_mode) || uint64_t(s.st_dev) != file.device || uint64_t(s.st_ino) != file.inode ||
        uint64_t(s.st_size) != file.size || ns(s.st_mtim) != file.mtime_ns || ns(s.st_ctim) != file.ctime_ns) {
        throw StageError("identity_changed", "the model file is not in the state that was identified");
    }
}

struct Session {
    uint32_t slot = 0;
    Sampling sampling;
    uint32_t start = 0;            // of the generated text
    std::vector<int32_t> history;  // of the text at positions 0, 1, ...; complete at a tail only
    std::unique_ptr<Matcher> matcher;  // of the generated text, when it has a grammar
};

size_t text_bytes(const Tokenize & m) {
    size_t sum = m.text.size();
    for (const Segment & segment : m.segments) {
        sum += segment.text.size();
    }
    return sum;
}

class Worker {
  public:
    Worker(int out, std::atomic<uint32_t> & bound) : out_(out), bound_(bound) {}

    void hello() { send(0, Hello{kWorkerVersion, MESHNODE_ENGINE}); }

    void serve(Queue & queue) {
        while (true) {
            const Loaded * loaded = stage_ ? &stage_->loaded() : nullptr;
            // One position of every session always fits one batch of the engine.
            const uint32_t most = loaded ? std::max(loaded->max_step, loaded->n_sessions) : 0;
            std::vector<Job> jobs = queue.next(most, loaded ? uint32_t(loaded->n_embd) : 1);
            if (jobs.empty()) {
                return beside_.finish();
            }
            jobs.front().push() ? run(jobs) : answer(jobs.front());
        }
    }

  private:
    void send(uint64_t id, const Reply & reply) {
        std::lock_guard lock(writing_);
        encode(buffer_, id, reply);
        if (stage_ && buffer_.size() > kHeaderBytes + 4 * uint64_t(bound_.load())) {
            encode(buffer_, id, Error{"bad_frame", "the reply would be too long: ask for less at once"});
        }
        for (size_t sent = 0; sent < buffer_.size();) {
            const ssize_t n = ::write(out_, buffer_.data() + sent, buffer_.size() - sent);
            if (n < 0 && errno != EINTR) {
                std::_Exit(0);  // the node has gone
            }
            sent += n > 0 ? size_t(n) : 0;
        }
    }

    // What the work throws becomes the request's answer; nothing that one request asks ends the others.
    template <class F> void guard(uint64_t id, F && work) {
        try {
            work();
        } catch (const StageError & e) {
            send(id, Error{e.code, e.what()});
        } catch (const std::bad_alloc &) {
            send(id, Error{"out_of_memory", "the worker ran out of memory"});
        } catch (const std::exception & e) {
            std::fprintf(stderr, "worker: request %llu: %s\n", (unsigned long long) id, e.what());
            send(id, Error{"internal", "the worker failed on this request"});
        }
    }

    void answer(Job & job) {
        guard(job.id, [&] {
            if (const auto * refused = std::get_if<Refused>(&job.work)) {
                return send(job.id, Error{refused->code, refused->message});
            }
            auto & request = std::get<Request>(job.work);
            if (!stage_ && !std::holds_alternative<Load>(request)) {
                throw BadFrame("nothing is loaded yet");
            }
            if (auto * text = std::get_if<Tokenize>(&request); text && text_bytes(*text) > kShortText) {
                return beside_.add([this, id = job.id, text = std::move(*text)] {
                    guard(id, [&] { send(id, Tokens{metered(kTokenizing, [&] { return tokens(text); })}); });
                });
            }
            send(job.id, std::visit([&](const auto & message) { return handle(message); }, request));
        });
    }

    Reply handle(const Load & load) {
        if (stage_) {
            throw BadFrame("a model is loaded already");
        }
        std::for_each(load.files.begin(), load.files.end(), check_identity);
        std::vector<std::string> paths;
        for (const ModelFile & file : load.files) {
            paths.push_back(file.path);
        }
        auto stage = Stage::open({std::move(paths), load.layers, load.n_sessions, load.n_ctx, load.max_step, load.n_threads, load.numerics});
        std::for_each(load.files.begin(), load.files.end(), check_identity);  // nor did they change while the engine read
        const Loaded & loaded = stage->loaded();
        taken_.assign(loaded.n_sessions, false);
        bound_ = request_bound(uint64_t(loaded.n_embd), loaded.n_ctx, loaded.max_step);
        stage_ = std::move(stage);
        return LoadedReply{loaded};
    }

    Reply handle(const Open & open) {
        Session s = begin(open.handle, open.sampling, open.start, open.prompt);
        stage_->truncate(s.slot, 0);
        keep(open.handle, std::move(s));
        return Opened{};
    }

    Reply handle(const Fork & fork) {
        const Session & from = session(fork.from);
        if (fork.keep > uint32_t(stage_->used(from.slot))) {
            throw StageError("cache_miss", "fewer positions than that are in the cache");
        }
        std::vector<int32_t> history(from.history.begin(), from.history.begin() + std::ptrdiff_t(std::min<size_t>(fork.keep, from.history.size())));
        if (!fork.prompt.empty() && history.size() < fork.keep) {
            throw StageError("cache_miss", "the history does not reach the positions that are kept");
        }
        history.insert(history.end(), fork.prompt.begin(), fork.prompt.end());
        Session s = begin(fork.handle, fork.sampling, fork.start, std::move(history));
        stage_->fork(from.slot, s.slot, int32_t(fork.keep));
        keep(fork.handle, std::move(s));
        return Forked{};
    }

    // A session in a free slot, which is not taken yet: nothing has to be undone when the rest fails.
    Session begin(uint64_t handle, const Sampling & sampling, uint32_t start, std::vector<int32_t> history) {
        if (sessions_.contains(handle)) {
            throw BadFrame("the handle is in use");
        }
        if (history.size() > stage_->loaded().n_ctx) {
            throw StageError("context_exceeded", "the history is longer than the context");
        }
        check_tokens(history);
        for (const auto & [token, bias] : sampling.logit_bias) {
            if (token >= stage_->loaded().n_vocab) {
                throw StageError("bad_bias", "there is no token " + std::to_string(token) + " to bias: the model has " +
                                                 std::to_string(stage_->loaded().n_vocab));
            }
        }
        const auto free = std::find(taken_.begin(), taken_.end(), false);
        if (free == taken_.end()) {
            throw StageError("busy", "every session is taken");
        }
        std::unique_ptr<Matcher> matcher;
        if (!sampling.grammar.empty() && is_tail()) {
            matcher = std::make_unique<Matcher>(std::make_shared<Grammar>(sampling.grammar), vocabulary());
        }
        return {uint32_t(free - taken_.begin()), sampling, start, std::move(history), std::move(matcher)};
    }

    void keep(uint64_t handle, Session && s) {
        taken_[s.slot] = true;
        sessions_[handle] = std::move(s);
    }

    bool is_tail() const { return stage_->loaded().layers.end == stage_->loaded().n_layer; }

    std::shared_ptr<const Vocabulary> vocabulary() {
        if (!vocabulary_) {
            std::vector<std::string> pieces;
            std::vector<bool> ends;
            for (int32_t id = 0; id < stage_->loaded().n_vocab; ++id) {
                pieces.push_back(stage_->piece(id));
                ends.push_back(stage_->is_end(id));
            }
            vocabulary_ = std::make_shared<Vocabulary>(std::move(pieces), std::move(ends));
        }
        return vocabulary_;
    }

    Reply handle(const Close & close) {
        if (const auto found = sessions_.find(close.handle); found != sessions_.end()) {
            stage_->truncate(found->second.slot, 0);
            taken_[found->second.slot] = false;
            sessions_.erase(found);
        }
        return Closed{};  // also when it was closed before: closing twice is no error
    }

    Reply handle(const Truncate & truncate) {
        const Session & s = session(truncate.handle);
        if (truncate.keep > uint32_t(stage_->used(s.slot))) {
            throw StageError("cache_miss", "fewer positions than that are in the cache");
        }
        stage_->truncate(s.slot, int32_t(truncate.keep));
        return Truncated{};
    }

    std::vector<int32_t> tokens(const Tokenize & m) const {
        return m.chat ? stage_->tokenize_chat(m.segments) : stage_->tokenize(m.text, m.add_special, m.parse_special);
    }

    Reply handle(const Tokenize & m) { return Tokens{tokens(m)}; }

    Reply handle(const Pieces & m) {
        check_tokens(m.ids);
        PieceList list;
        for (int32_t id : m.ids) {
            list.pieces.push_back(stage_->piece(id));
        }
        return list;
    }

    Reply handle(const DescribeChat &) { return ChatFactsReply{stage_->chat_facts()}; }

    Reply handle(const Push &) { throw BadFrame("a step by itself"); }  // run() takes them

    Session & session(uint64_t handle) {
        const auto found = sessions_.find(handle);
        if (found == sessions_.end()) {
            throw StageError("unknown_session", "no session of that handle is open");
        }
        return found->second;
    }

    void check_tokens(std::span<const int32_t> ids) {
        for (int32_t id : ids) {
            if (id < 0 || id >= stage_->loaded().n_vocab) {
                throw BadFrame("a token id is outside the vocabulary");
            }
        }
    }

    struct Planned {
        uint64_t  id;
        Push *    push;
        Session * session;
        Step      step;
    };

    // Throws what this step alone is to be answered with, before it is put beside others.
    Planned plan(Job & job) {
        if (!stage_) {
            throw BadFrame("nothing is loaded yet");
        }
        Push & push = *job.push();
        Session & s = session(push.handle);
        const Loaded & loaded = stage_->loaded();
        if (push.residual.size() % uint32_t(loaded.n_embd) != 0) {
            throw BadFrame("the residual is no whole number of positions");
        }
        const size_t n = positions(push, uint32_t(loaded.n_embd));
        if (n > loaded.max_step) {
            throw BadFrame("more positions than a step may carry");
        }
        if (push.first_pos < 0) {
            throw BadFrame("the first position is negative");
        }
        if (push.sample && push.effective.end != loaded.n_layer) {
            throw BadFrame("only the last layer's output can be sampled");
        }
        if (push.sample && push.tokens.empty() && s.history.size() < push.first_pos + n) {
            throw StageError("cache_miss", "the history does not reach the position to sample at");
        }
        return {job.id, &push, &s, {s.slot, push.first_pos, push.tokens, push.residual, push.sample}};
    }

    void run(std::vector<Job> & jobs) {
        std::vector<Planned> plans;
        for (Job & job : jobs) {
            guard(job.id, [&] { plans.push_back(plan(job)); });
        }
        std::sort(plans.begin(), plans.end(), [](auto & a, auto & b) { return a.step.slot < b.step.slot; });
        if (plans.empty() || (plans.size() > 1 && forward(plans, true))) {
            return;
        }
        for (Planned & one : plans) {  // alone, or because one of the batch is at fault
            forward({&one, 1}, false);
        }
    }

    // False when it threw and may be tried again; otherwise every plan has been answered.
    bool forward(std::span<Planned> plans, bool may_fail) {
        std::vector<Step> steps;
        size_t total = 0;
        const auto n_embd = uint32_t(stage_->loaded().n_embd);
        for (const Planned & one : plans) {
            steps.push_back(one.step);
            total += positions(*one.push, n_embd);
        }
        std::vector<StepOutput> outputs;
        const uint64_t begin = now_ns();
        try {
            outputs = stage_->forward(steps, plans[0].push->effective);
        } catch (const std::exception &) {
            if (may_fail) {
                return false;
            }
            guard(plans[0].id, [] { throw; });
            return true;
        }
        const uint64_t spent = now_ns() - begin;
        for (size_t i = 0; i < plans.size(); ++i) {
            guard(plans[i].id, [&] { finish(plans[i], outputs.at(i), spent * positions(*plans[i].push, n_embd) / total); });
        }
        return true;
    }

    // share: of the batch's time, by positions.
    void finish(Planned & plan, const StepOutput & output, uint64_t share) {
        const uint64_t begin = now_ns();
        auto & history = plan.session->history;
        const Push & push = *plan.push;
        if (push.effective.end != stage_->loaded().n_layer) {
            return send(plan.id, Stepped{share, std::span<const float>(output.residual)});
        }
        if (!push.tokens.empty() && history.size() >= size_t(push.first_pos)) {  // what was pushed is the text
            history.resize(size_t(push.first_pos));
            history.insert(history.end(), push.tokens.begin(), push.tokens.end());
        }
        if (!push.sample) {
            return send(plan.id, Stepped{share, {}});
        }
        // A push that is repeated samples again at its own position, from the same history.
        const size_t position = size_t(push.first_pos) + positions(push, uint32_t(stage_->loaded().n_embd));
        if (history.size() < position) {
            throw StageError("cache_miss", "the history does not reach the position to sample at");
        }
        Sampled sampled;
        try {
            sampled = choose(*plan.session, output.logits, position);
        } catch (...) {  // a step that is answered with an error has changed nothing
            stage_->truncate(plan.session->slot, push.first_pos);
            throw;
        }
        history.resize(position);
        history.push_back(sampled.token);
        send(plan.id, Stepped{share + now_ns() - begin, std::move(sampled)});
    }

    Sampled choose(Session & s, std::span<const float> logits, size_t position) {
        const auto before = std::span<const int32_t>(s.history).first(position);
        if (s.matcher) {
            s.matcher->follow(before.subspan(std::min<size_t>(s.start, position)));
        }
        const int32_t token = sample(logits, before, s.sampling, position, s.matcher.get());
        Sampled out{token, stage_->is_end(token), stage_->piece(token), {}};
        if (s.sampling.logprobs != kNoLogprobs) {
            const std::vector<Logprob> likely = logprobs(logits, token, s.sampling.logprobs);
            out.logprobs.emplace().chosen = likely[0].value;
            for (const Logprob & l : std::span(likely).subspan(1)) {
                out.logprobs->top.push_back({l.token, l.value, stage_->piece(l.token)});
            }
        }
        return out;
    }

    int out_;
    std::mutex writing_;
    std::atomic<uint32_t> & bound_;
    std::unique_ptr<Stage> stage_;
    std::vector<bool> taken_;  // by slot
    std::shared_ptr<const Vocabulary> vocabulary_;  // made for the first grammar
    std::unordered_map<uint64_t, Session> sessions_;
    std::vector<std::byte> buffer_;
    Beside beside_;  // the last, so that it ends before what it uses
};

void read_requests(int in, Queue & queue, const std::atomic<uint32_t> & bound) {
    const ReadSome read = [in](std::byte * into, size_t n) -> size_t {
        while (true) {
            const ssize_t got = ::read(in, into, n);
            if (got >= 0) {
                return size_t(got);
            }
            if (errno != EINTR) {
                throw FramingLost("stdin cannot be read");
            }
        }
    };
    try {
        for (Job job; read_frame(read, bound, job.frame); job = {}) {
            job.id = job.frame.id;
            try {
                job.work = decode_request(job.frame.kind, job.frame.body());
            } catch (const BadFrame & e) {
                job.work = Refused{e.code, e.what()};
            }
            queue.push(std::move(job));
        }
    } catch (const FramingLost & e) {
        std::fprintf(stderr, "worker: framing lost: %s\n", e.what());
        std::_Exit(kExitFramingLost);
    }
    queue.finish();
}

}  // namespace
}  // namespace meshnode

int main() {
    using namespace meshnode;
    const rlimit no_core{0, 0};  // a core of gigabytes would keep the pipes open while it is written
    ::setrlimit(RLIMIT_CORE, &no_core);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::signal(SIGPIPE, SIG_IGN);
    // The pipes move away from 0 and 1, so that nothing a library prints or reads can break the framing.
    const int in = ::fcntl(0, F_DUPFD_CLOEXEC, 3), out = ::fcntl(1, F_DUPFD_CLOEXEC, 3);
    const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (in < 0 || out < 0 || null < 0 || ::dup2(null, 0) < 0 || ::dup2(2, 1) < 0) {
        std::fprintf(stderr, "worker: stdin, stdout or stderr cannot be used\n");
        return kExitSetup;
    }
    ::close(null);
    std::atomic<uint32_t> bound = kUnloadedBound;
    Queue queue;
    Worker worker(out, bound);
    worker.hello();
    std::thread reader([&] { read_requests(in, queue, bound); });
    worker.serve(queue);
    reader.join();
    return 0;
}
