;; The smallest complete controller, in the form with three callbacks (P1): allows only token 42, three times.
(module
  (import "env" "aici_host_return_process_result" (func $return (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $return_mask (param i32)))
  (memory (export "memory") 2)
  (global $steps (mut i32) (i32.const 0))

  (data (i32.const 0) "{}")
  (data (i32.const 8) "{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
  (data (i32.const 64) "{\"SampleWithBias\":{}}")
  (data (i32.const 96) "{\"stop\":false}")
  (data (i32.const 112) "{\"stop\":true}")

  (func (export "aici_init"))

  ;; The number that the other callbacks get.
  (func (export "aici_create") (result i32) (i32.const 1))

  (func (export "aici_init_prompt") (param i32)
    (call $return (i32.const 0) (i32.const 2)))

  (func (export "aici_pre_process") (param i32)
    (call $return (i32.const 8) (i32.const 46)))

  ;; The mask is the rest of the memory, 0 but for one bit: token 42 is bit 10 of word 1.
  (func (export "aici_mid_process") (param i32)
    (i32.store (i32.const 1028) (i32.const 0x400))
    (call $return_mask (i32.const 1024))
    (call $return (i32.const 64) (i32.const 21)))

  (func (export "aici_post_process") (param i32)
    (global.set $steps (i32.add (global.get $steps) (i32.const 1)))
    (if (i32.lt_u (global.get $steps) (i32.const 3))
      (then (call $return (i32.const 96) (i32.const 14)))
      (else (call $return (i32.const 112) (i32.const 13))))))
