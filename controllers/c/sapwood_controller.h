/* The imports and exports of a controller in C, in the form with three callbacks (P1).
 *
 *     clang --target=wasm32 -O2 -fno-builtin -nostdlib -Wl,--no-entry -o yes.wasm yes.c
 *
 * Without -fno-builtin loops over memory become calls of memset and memcpy, which do not exist here.
 *
 * A module defines the six callbacks at the end of this file. They are called in their order here: the first three
 * once, then pre, mid and post in each step. A host may call pre more than once before mid. Each callback but the first
 * two returns its result with SW_RETURN. */
#ifndef SAPWOOD_CONTROLLER_H
#define SAPWOOD_CONTROLLER_H

#define SW_IMPORT(name) __attribute__((import_module("env"), import_name(name)))
#define SW_EXPORT(name) __attribute__((export_name(name)))

/* Writes at most `size` bytes of a blob to `target`; returns how many the blob has. */
SW_IMPORT("aici_host_read_blob") unsigned sw_read_blob(unsigned blob, void *target, unsigned size);
/* The controller's argument, as it was sent. */
SW_IMPORT("aici_host_module_arg") unsigned sw_argument(void);
/* The argument of this callback, JSON. */
SW_IMPORT("aici_host_process_arg") unsigned sw_callback_argument(void);
/* The vocabulary as a trie. */
SW_IMPORT("aici_host_token_trie") unsigned sw_token_trie(void);
/* A blob with the tokens of a text, 32 bits each. */
SW_IMPORT("aici_host_tokenize") unsigned sw_tokenize(const char *text, unsigned length);
/* The allowed tokens of this step: bit t % 32 of word t / 32 is token t. The whole vocabulary is read. */
SW_IMPORT("aici_host_return_logit_bias") void sw_return_mask(const unsigned *words);
SW_IMPORT("aici_host_return_process_result") void sw_return(const char *json, unsigned length);
/* Reads or writes a variable; a blob with the reply. */
SW_IMPORT("aici_host_storage_cmd") unsigned sw_storage(const char *json, unsigned length);
SW_IMPORT("aici_host_self_seq_id") unsigned sw_self_id(void);
SW_IMPORT("aici_host_eos_token") unsigned sw_eos_token(void);
SW_IMPORT("aici_host_get_config") int sw_config(const char *name, unsigned length);

/* Returns a result that is a string literal. */
#define SW_RETURN(json) sw_return(json, sizeof(json) - 1)

/* Results of pre. */
#define SW_GO_ON SW_RETURN("{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
#define SW_WAIT SW_RETURN("{\"num_forks\":1,\"suspend\":true,\"ff_tokens\":[]}")
/* Results of mid: after sw_return_mask, and without a mask. */
#define SW_SAMPLE SW_RETURN("{\"SampleWithBias\":{}}")
#define SW_STOP SW_RETURN("\"Stop\"")
/* Result of post: 0 or 1. */
#define SW_STOPS(stops) ((stops) ? SW_RETURN("{\"stop\":true}") : SW_RETURN("{\"stop\":false}"))

SW_EXPORT("aici_init") void sw_init(void);
SW_EXPORT("aici_create") unsigned sw_create(void);
SW_EXPORT("aici_init_prompt") void sw_init_prompt(unsigned handle);
SW_EXPORT("aici_pre_process") void sw_pre(unsigned handle);
SW_EXPORT("aici_mid_process") void sw_mid(unsigned handle);
SW_EXPORT("aici_post_process") void sw_post(unsigned handle);

#endif
