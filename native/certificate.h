// The architectures that are proven, and what of each: from meshnode/artifact/architectures.json, which a sweep over the
// engine's architectures writes. Whatever is not listed is refused by name.
#pragma once

#include <cstdint>
#include <string_view>

namespace meshnode {

struct Certificate {
    std::string_view architecture;
    bool             truncate;   // a session can keep any number of its positions, or else none
    int              planes;     // values that make up a position
    uint64_t         invariant;  // bits of the ggml types of weights with which Numerics::invariant holds ...
    uint64_t         fast;       // ... and with which Numerics::fast is exact at every cut
};

struct Refusal {
    std::string_view architecture;
    std::string_view reason;
};

#include "certificates.inc"

// nullptr when it is not proven.
inline const Certificate * certificate_of(std::string_view architecture) {
    for (const Certificate & c : kCertificates) {
        if (c.architecture == architecture) {
            return &c;
        }
    }
    return nullptr;
}

inline std::string_view refusal_of(std::string_view architecture) {
    for (const Refusal & r : kRefused) {
        if (r.architecture == architecture) {
            return r.reason;
        }
    }
    return "it was never proven";
}

}  // namespace meshnode
