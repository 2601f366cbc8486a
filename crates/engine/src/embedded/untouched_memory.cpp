// Leaves memory that llama.cpp fills with zeros to the kernel until it is used.
//
// A KV cache has cells for contexts that most slots never reach, and llama.cpp writes zeros to all of them when it makes the cache:
// 1.5 GiB for eight slots of a model of 90 MiB. Here the pages are given back instead. The kernel has zeros in them when they are read,
// and memory for them when they are written.
//
// The declarations of ggml must be those of the pinned release (`ggml-backend-impl.h`). A test loads a model, and looks at the memory of
// its cache before and after it is used.

#include "cpu_hooks.h"

#include <cstring>

extern "C" {

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t, struct ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, struct ggml_tensor *);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void * context;
    size_t size;
    enum ggml_backend_buffer_usage usage;
};
}

// Elsewhere such a call does not promise zeros.
#ifdef __linux__

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace {

// Smaller buffers are cleared as before: they share their pages with other memory of the process.
constexpr size_t BYTES_MIN = 1 << 20;
// Pages that the kernel is asked about at a time.
constexpr size_t PAGES_ASKED = 1 << 16;

// What ggml had before.
decltype(ggml_backend_buffer_type_i::alloc_buffer) allocate_as_before = nullptr;
decltype(ggml_backend_buffer_i::free_buffer) free_as_before = nullptr;
decltype(ggml_backend_buffer_i::clear) clear_as_before = nullptr;

std::mutex guard;

// Whole pages within the buffers that were given back: their start and their bytes, by the address of the buffer.
std::map<void *, std::pair<char *, size_t>> & given_back() {
    // Never destroyed: a buffer may be freed as the process ends.
    static auto * pages = new std::map<void *, std::pair<char *, size_t>>;
    return *pages;
}

size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const uintptr_t page = page_bytes();
    unsigned char last = 1;
    const uintptr_t start = reinterpret_cast<uintptr_t>(buffer->context);
    const uintptr_t from = (start + page - 1) / page * page;
    const uintptr_t to = (start + buffer->size) / page * page;
    char * const pages = reinterpret_cast<char *>(from);
    // The call fails for memory that is locked, and does nothing in emulators, or to the end of what is no whole huge page.
    if (value != 0 || madvise(pages, to - from, MADV_DONTNEED) != 0 || mincore(reinterpret_cast<void *>(to - page), page, &last) != 0 ||
        (last & 1) != 0) {
        clear_as_before(buffer, value);
        return;
    }
    std::memset(buffer->context, 0, from - start);
    std::memset(pages + (to - from), 0, start + buffer->size - to);
    const std::lock_guard<std::mutex> locked(guard);
    given_back()[buffer->context] = {pages, to - from};
}

void free_buffer(ggml_backend_buffer_t buffer) {
    {
        const std::lock_guard<std::mutex> locked(guard);
        given_back().erase(buffer->context);
    }
    free_as_before(buffer);
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    ggml_backend_buffer_t buffer = allocate_as_before(type, bytes);
    if (buffer && buffer->size >= BYTES_MIN && buffer->iface.clear) {
        // The same for all buffers of this type.
        static std::once_flag once;
        std::call_once(once, [buffer] {
            clear_as_before = buffer->iface.clear;
            free_as_before = buffer->iface.free_buffer;
        });
        buffer->iface.clear = clear;
        buffer->iface.free_buffer = free_buffer;
    }
    return buffer;
}

}  // namespace

// To be called before the first model is loaded, and once.
extern "C" void sapwood_untouched_install() {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    allocate_as_before = type->iface.alloc_buffer;
    type->iface.alloc_buffer = allocate;
}

// The bytes of all such buffers that are in use by nobody yet, and will be. What was read without being written counts as used:
// attention does not look at cells that it hides, but where flash attention is off.
extern "C" uint64_t sapwood_untouched_bytes() {
    static unsigned char resident[PAGES_ASKED];
    const std::lock_guard<std::mutex> locked(guard);
    uint64_t untouched = 0;
    for (const auto & [buffer, pages] : given_back()) {
        const size_t step = PAGES_ASKED * page_bytes();
        for (size_t at = 0; at < pages.second; at += step) {
            const size_t bytes = std::min(step, pages.second - at);
            if (mincore(pages.first + at, bytes, resident) != 0) {
                continue;
            }
            const size_t count = bytes / page_bytes();
            const auto absent = std::count_if(resident, resident + count, [](unsigned char is) { return (is & 1) == 0; });
            untouched += static_cast<uint64_t>(absent) * page_bytes();
        }
    }
    return untouched;
}

#else

extern "C" void sapwood_untouched_install() {}

extern "C" uint64_t sapwood_untouched_bytes() { return 0; }

#endif
