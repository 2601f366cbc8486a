/* Answers "yes": allows one token in each step. */
#include "sapwood_controller.h"

/* Room for the masks of 262,144 tokens. */
enum { WORDS = 8192, TOKENS_MAX = 64 };

static unsigned mask[WORDS], tokens[TOKENS_MAX], count, at;

void sw_init(void) {}

unsigned sw_create(void) {
    count = sw_read_blob(sw_tokenize("yes", 3), tokens, sizeof tokens) / 4;
    return 1;
}

void sw_init_prompt(unsigned handle) { SW_RETURN("{}"); }

void sw_pre(unsigned handle) { SW_GO_ON; }

void sw_mid(unsigned handle) {
    for (unsigned i = 0; i < WORDS; i++)
        mask[i] = 0;
    mask[tokens[at] / 32] = 1u << tokens[at] % 32;
    sw_return_mask(mask);
    SW_SAMPLE;
}

void sw_post(unsigned handle) {
    at++;
    SW_STOPS(at == count);
}
