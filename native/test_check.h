// What the native tests count: each fault is said once, and the program's end says whether there was any.
#pragma once

#include <cstdio>
#include <string>

inline int failures = 0;

inline void check(bool holds, const std::string & what) {
    if (!holds) {
        failures++;
        std::fprintf(stderr, "FAIL %s\n", what.c_str());
    }
}

inline void check(bool holds, const std::string & name, const char * what) {
    if (!holds) {
        check(false, name.substr(0, 200) + ": " + what);
    }
}
