// How operations of ggml's CPU backend are taken over, and what of that backend is not in its installed headers.
//
// The declarations of ggml must be those of the pinned release (`ggml-cpu/traits.h`, `ggml-cpu-impl.h`, `ggml-backend-impl.h`); a test
// compares each bit of a product that comes through them.

#pragma once

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" {

struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void * wdata;
    struct ggml_threadpool * threadpool;
    bool use_ref;
};

void ggml_barrier(struct ggml_threadpool *);
void ggml_threadpool_chunk_set(struct ggml_threadpool *, int);
int ggml_threadpool_chunk_add(struct ggml_threadpool *, int);

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    ggml_backend_buffer_t (*alloc_buffer_n)(ggml_backend_buffer_type_t, struct ggml_tensor **, int);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const struct ggml_tensor *);
    size_t (*get_alloc_size_n)(ggml_backend_buffer_type_t, struct ggml_tensor **, int);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    struct ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void * context;
};
}

namespace ggml::cpu {

class tensor_traits {
  public:
    virtual ~tensor_traits() = default;
    virtual bool work_size(int threads, const struct ggml_tensor * operation, size_t & size) = 0;
    virtual bool compute_forward(struct ggml_compute_params * thread, struct ggml_tensor * operation) = 0;
};

class extra_buffer_type {
  public:
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(ggml_backend_dev_t device, const struct ggml_tensor * operation) = 0;
    virtual tensor_traits * get_tensor_traits(const struct ggml_tensor * operation) = 0;
};

}  // namespace ggml::cpu

using ExtraBufferTypes = std::vector<ggml_backend_buffer_type_t>;
ExtraBufferTypes & ggml_backend_cpu_get_extra_buffer_types();

namespace sapwood {

// The functions of the CPU backend. Where that is a library which was loaded at the start, they are found in it.
struct Backend {
    decltype(&ggml_cpu_has_avx2) has_avx2;
    decltype(&ggml_cpu_has_fma) has_fma;
    decltype(&ggml_cpu_has_f16c) has_f16c;
    decltype(&ggml_get_type_traits_cpu) traits;
    decltype(&ggml_barrier) barrier;
    decltype(&ggml_threadpool_chunk_set) chunk_set;
    decltype(&ggml_threadpool_chunk_add) chunk_add;
    ExtraBufferTypes & (*extra_buffer_types)();
};

// Whether the instructions in use are AVX-512's; otherwise they are AVX2's.
bool is_wide();

// Hands out the numbers from 0 to `parts` - 1 to the threads of an operation. All of them call it, and what each wrote before is then
// seen by all.
template <typename Function> void share_parts(const Backend & backend, const ggml_compute_params & thread, int64_t parts, Function run) {
    if (thread.ith == 0) {
        backend.chunk_set(thread.threadpool, thread.nth);
    }
    backend.barrier(thread.threadpool);
    for (int64_t part = thread.ith; part < parts; part = backend.chunk_add(thread.threadpool, 1)) {
        run(part);
    }
}

// The start of a work buffer, which is aligned for nothing in particular; its size includes these 64 bytes.
inline char * aligned(void * work) { return static_cast<char *>(work) + (64 - reinterpret_cast<uintptr_t>(work) % 64) % 64; }

// Whether a tensor's bytes are where ggml's own operations expect them.
inline bool lies_as_ggml_has_it(const ggml_tensor * tensor) {
    const ggml_tensor * owner = tensor->view_src ? tensor->view_src : tensor;
    return !owner->buffer || ggml_backend_buffer_is_host(owner->buffer);
}

// Products of weights and tokens (`matmul_x86.cpp`). Returns whether they have ggml's bits; otherwise none is taken over.
bool prepare_products(const Backend & backend);
// What computes a product, or null if that stays with ggml.
ggml::cpu::tensor_traits * product_of(const ggml_tensor * operation);

// Attention (`attention_x86.cpp`).
void prepare_attention(const Backend & backend);
ggml::cpu::tensor_traits * attention_of(const ggml_tensor * operation);

}  // namespace sapwood
