// Has ggml's CPU backend compute some operations here.
//
// ggml asks each extra type of CPU buffer whether it takes over an operation. The type that is added here owns no buffer: it is in
// the list only to be asked.

#include "cpu_hooks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)

#ifdef SAPWOOD_DYNAMIC_BACKENDS
#include <dlfcn.h>
#endif

#include <atomic>
#include <mutex>

using namespace sapwood;

namespace {

std::atomic<bool> uses_avx512{false};

#ifdef SAPWOOD_DYNAMIC_BACKENDS
template <typename Function> bool find(void * library, const char * name, Function & function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

// In the library that has `of_backend`, which is never unloaded.
bool find_backend(void * of_backend, Backend & backend) {
    Dl_info info;
    if (!of_backend || !dladdr(of_backend, &info)) {
        return false;
    }
    void * library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return library && find(library, "ggml_cpu_has_avx2", backend.has_avx2) && find(library, "ggml_cpu_has_fma", backend.has_fma) &&
           find(library, "ggml_cpu_has_f16c", backend.has_f16c) &&
           find(library, "ggml_get_type_traits_cpu", backend.traits) && find(library, "ggml_barrier", backend.barrier) &&
           find(library, "ggml_threadpool_chunk_set", backend.chunk_set) &&
           find(library, "ggml_threadpool_chunk_add", backend.chunk_add) &&
           find(library, "_Z39ggml_backend_cpu_get_extra_buffer_typesv", backend.extra_buffer_types);
}
#else
bool find_backend(void *, Backend & backend) {
    backend = {ggml_cpu_has_avx2, ggml_cpu_has_fma, ggml_cpu_has_f16c, ggml_get_type_traits_cpu, ggml_barrier, ggml_threadpool_chunk_set,
               ggml_threadpool_chunk_add, ggml_backend_cpu_get_extra_buffer_types};
    return true;
}
#endif

class Hook final : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * operation) override {
        switch (operation->op) {
            case GGML_OP_MUL_MAT:
                return product_of(operation);
            case GGML_OP_FLASH_ATTN_EXT:
                return attention_of(operation);
            default:
                return nullptr;
        }
    }
};

Hook hook;

void add_to_list(const Backend & backend) {
    static ggml_backend_buffer_type type = {};
    type.iface.get_name = [](ggml_backend_buffer_type_t) { return "Sapwood"; };
    type.iface.alloc_buffer = [](ggml_backend_buffer_type_t, size_t) -> ggml_backend_buffer_t { return nullptr; };
    type.iface.get_alignment = [](ggml_backend_buffer_type_t) -> size_t { return 64; };
    type.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    // As ggml reads it: a pointer to the base.
    type.context = static_cast<ggml::cpu::extra_buffer_type *>(&hook);
    backend.extra_buffer_types().push_back(&type);
}

}  // namespace

bool sapwood::is_wide() { return uses_avx512.load(std::memory_order_relaxed); }

// Whether `operation` is one that is taken over.
extern "C" bool sapwood_hooks_take(const ggml_tensor * operation) { return hook.get_tensor_traits(operation) != nullptr; }

// The bytes of the work buffer that `operation` asks for with so many threads; 0 if it is not taken over.
extern "C" size_t sapwood_hooks_work_bytes(const ggml_tensor * operation, int threads) {
    ggml::cpu::tensor_traits * taken = hook.get_tensor_traits(operation);
    size_t bytes = 0;
    return taken && taken->work_size(threads, operation, bytes) ? bytes : 0;
}

// Returns what the operations use from now on, or null where ggml's own paths stay. To be called before the first model is loaded: ggml
// reads the list of buffer types without a lock. Where the CPU backend is a library that was loaded at the start, its functions
// are found by one of them, `of_backend`.
extern "C" const char * sapwood_hooks_install(bool may_use_avx512, void * of_backend) {
    Backend backend = {};
    // What ggml has been compiled for the processor has; and a product has its bits only where it uses the same instructions.
    if (!find_backend(of_backend, backend) || !backend.has_avx2() || !backend.has_fma() || !backend.has_f16c()) {
        return nullptr;
    }
    __builtin_cpu_init();
    uses_avx512 = may_use_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
    prepare_attention(backend);
    const bool has_products = prepare_products(backend);
    static std::once_flag once;
    std::call_once(once, add_to_list, backend);
    if (!has_products) {
        return is_wide() ? "AVX-512, attention alone" : "AVX2, attention alone";
    }
    return is_wide() ? "AVX-512 VNNI" : "AVX2";
}

#else

extern "C" bool sapwood_hooks_take(const ggml_tensor *) { return false; }

extern "C" size_t sapwood_hooks_work_bytes(const ggml_tensor *, int) { return 0; }

extern "C" const char * sapwood_hooks_install(bool, void *) { return nullptr; }

#endif
