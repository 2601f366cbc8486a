// For tests, and linked into nothing else: has a decode call throw, as one that runs out of memory does.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "ggml.h"

// A callback of ggml's scheduler. `data` is a number of graphs: it is counted down at the end of each, when the tokens are in the KV
// cache, and where it becomes zero this throws.
extern "C" bool sapwood_throw_at_graph(ggml_tensor * node, bool is_asked, void * data) {
    if (is_asked) {
        return std::strcmp(node->name, "result_output") == 0 || std::strcmp(node->name, "result_embd_pooled") == 0;
    }
    auto & left = *static_cast<std::atomic<std::uint32_t> *>(data);
    if (left > 0 && --left == 0) {
        throw std::runtime_error("thrown for a test");
    }
    return true;
}
