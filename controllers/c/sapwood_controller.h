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

/* Only Sapwood has these: constraints and masks in the host, by handles that are never 0. A module has 64 of them, and
 * frees them. What is not used is not imported, so a module without them runs everywhere. */
#define SW_HOST(name) __attribute__((import_module("sapwood"), import_name(name)))
/* A constraint; the kind is regex, json-schema, lark, gbnf, substring or options. 0: the reason is in blob 6. */
SW_HOST("constraint_new") unsigned sw_constraint(const char *kind, unsigned kind_length, const char *pattern, unsigned length);
/* 1 if the constraint allows the token; if not, 0, and nothing changes. */
SW_HOST("constraint_consume") int sw_constraint_consume(unsigned constraint, unsigned token);
/* Takes back the last tokens. */
SW_HOST("constraint_rollback") void sw_constraint_rollback(unsigned constraint, unsigned tokens);
/* A mask of the tokens that may follow. */
SW_HOST("constraint_mask") unsigned sw_constraint_mask(unsigned constraint);
/* A blob with tokens that must follow. */
SW_HOST("constraint_ff") unsigned sw_constraint_forced(unsigned constraint);
/* A mask of the tokens that start with these bytes, or are the start of them. */
SW_HOST("prefix_mask") unsigned sw_prefix_mask(const void *bytes, unsigned length);
SW_HOST("mask_and") unsigned sw_mask_and(unsigned a, unsigned b);
SW_HOST("mask_or") unsigned sw_mask_or(unsigned a, unsigned b);
SW_HOST("mask_not") unsigned sw_mask_not(unsigned mask);
/* Does what sw_return_mask does with words. The mask can be used again. */
SW_HOST("mask_return") unsigned sw_mask_return(unsigned mask);
/* Writes at most `size` bytes of a token to `target`; returns how many it has. */
SW_HOST("token_bytes") unsigned sw_token_bytes(unsigned token, void *target, unsigned size);
/* Writes the model's best tokens of the last step, at most 64 and before masks, and returns how many. Slows requests down. */
struct sw_best { unsigned token; float log_probability; };
SW_HOST("top_logits") unsigned sw_top_logits(unsigned count, struct sw_best *target);
/* Frees a constraint or a mask. */
SW_HOST("free") void sw_free(unsigned handle);

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
