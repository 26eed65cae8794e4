#include "metered.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <string>

#include "stage.h"

namespace meshnode {
namespace {

constexpr char kDone = 'd', kRefused = 'r';  // the first byte of what comes back; ids follow, or a code, a zero, a message

void write_all(int fd, const void * data, size_t size) {
    const char * at = static_cast<const char *>(data);
    while (size > 0) {
        const ssize_t n = ::write(fd, at, size);
        if (n < 0 && errno != EINTR) {
            ::_exit(1);
        }
        at += n > 0 ? n : 0;
        size -= n > 0 ? size_t(n) : 0;
    }
}

[[noreturn]] void child(int out, std::chrono::milliseconds limit, const std::function<std::vector<int32_t>()> & work) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const rlim_t seconds = rlim_t(limit.count() / 1000 + 1);
    const rlimit cpu{seconds, seconds};
    ::setrlimit(RLIMIT_CPU, &cpu);
    ::dup2(out, 3);  // the node's pipes must not stay open because of this process
    ::close_range(4, UINT_MAX, 0);
    try {
        const std::vector<int32_t> ids = work();
        write_all(3, &kDone, 1);
        write_all(3, ids.data(), ids.size() * sizeof(int32_t));
    } catch (const StageError & e) {
        const std::string said = kRefused + e.code + '\0' + e.what();
        write_all(3, said.data(), said.size());
    } catch (...) {
        ::_exit(1);
    }
    ::_exit(0);
}

// Until its end or the deadline.
std::string read_all(int fd, std::chrono::steady_clock::time_point ends, bool & in_time) {
    std::string data;
    char part[1 << 16];
    while (true) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(ends - std::chrono::steady_clock::now()).count();
        pollfd ready{fd, POLLIN, 0};
        const int polled = left > 0 ? ::poll(&ready, 1, int(left)) : 0;
        if (polled == 0) {
            in_time = false;
            return data;
        }
        const ssize_t n = polled > 0 ? ::read(fd, part, sizeof(part)) : -1;
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return data;
        }
        data.append(part, size_t(n > 0 ? n : 0));
    }
}

}  // namespace

std::vector<int32_t> metered(std::chrono::milliseconds limit, const std::function<std::vector<int32_t>()> & work) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
        throw StageError("internal", "no pipe can be had");
    }
    const pid_t pid = ::fork();
    if (pid == 0) {
        child(ends[1], limit, work);
    }
    ::close(ends[1]);
    bool in_time = true;
    const std::string data = pid > 0 ? read_all(ends[0], std::chrono::steady_clock::now() + limit, in_time) : "";
    ::close(ends[0]);
    if (pid < 0) {
        throw StageError("internal", "no process can be had");
    }
    ::kill(pid, SIGKILL);  // it has ended, or is to end
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    if (!in_time) {
        throw StageError("bad_prompt", "the text takes longer than " + std::to_string(limit.count()) + " ms to tokenize");
    }
    if (data.starts_with(kRefused) && data.find('\0') != data.npos) {
        throw StageError(data.substr(1, data.find('\0') - 1), data.substr(data.find('\0') + 1));
    }
    if (!data.starts_with(kDone) || (data.size() - 1) % sizeof(int32_t) != 0) {
        throw StageError("bad_prompt", "the text cannot be tokenized");
    }
    std::vector<int32_t> ids((data.size() - 1) / sizeof(int32_t));
    if (!ids.empty()) {
        std::memcpy(ids.data(), data.data() + 1, data.size() - 1);
    }
    return ids;
}

}  // namespace meshnode
