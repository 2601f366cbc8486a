// What of ggml's CPU backend is not in its installed headers: how an operation is taken over, and what its threads share.
//
// These declarations must be those of the pinned release (`ggml-cpu/traits.h`, `ggml-cpu-impl.h`, `ggml-backend-impl.h`); a test
// compares each bit of a product that comes through them.

#pragma once

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
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

// The name of the instructions that products use from now on, or null where ggml's own path stays. To be called before the first model is
// loaded: ggml reads the list of buffer types without a lock. Where the CPU backend is a library that was loaded at the start, its functions
// are found by one of them, `of_backend`.
const char * sapwood_matmul_install(bool may_use_avx512, void * of_backend);

// Whether `operation` is one that is taken over.
bool sapwood_matmul_takes(const struct ggml_tensor * operation);
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
