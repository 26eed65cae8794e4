// Stands in for upstream's common/log.h: as much as its generator of test models uses.
#pragma once

#include <cstdio>

#define LOG(...)     std::fprintf(stderr, __VA_ARGS__)
#define LOG_INF(...) std::fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...) std::fprintf(stderr, __VA_ARGS__)

enum { LOG_LEVEL_ERROR = 2, LOG_LEVEL_DEBUG = 5 };

inline int    common_log_get_verbosity(int) { return LOG_LEVEL_DEBUG; }
inline void   common_log_set_verbosity_thold(int) {}
inline void * common_log_main() { return nullptr; }
inline void   common_log_flush(void *) {}
