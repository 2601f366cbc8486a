//! The module's imports, as safe functions.

use alloc::vec;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::fmt;

use super::SingleThread;
use crate::trie::{HEADER_BYTES, Header};
use crate::vars::{Reply, Write, read_command, reply_of, write_command};
use crate::{SequenceId, Token, TokenTrie};

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn aici_host_read_blob(blob: u32, target: *mut u8, size: usize) -> usize;
    safe fn aici_host_module_arg() -> u32;
    safe fn aici_host_process_arg() -> u32;
    safe fn aici_host_token_trie() -> u32;
    fn aici_host_tokenize(text: *const u8, len: usize) -> u32;
    #[cfg(feature = "p1")]
    fn aici_host_return_logit_bias(words: *const u32);
    #[cfg(not(feature = "p1"))]
    fn aici_host_return_logit_bias(words: *const u32) -> u32;
    safe fn aici_host_self_seq_id() -> u32;
    fn aici_host_return_process_result(json: *const u8, len: usize);
    fn aici_host_storage_cmd(json: *const u8, len: usize) -> u32;
    safe fn aici_host_eos_token() -> u32;
    fn aici_host_get_config(name: *const u8, len: usize) -> i32;
}

#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn fd_write(file: u32, pieces: *const Piece, count: usize, written: *mut usize) -> u32;
}

/// A piece of what is written: WASI's `ciovec`.
#[repr(C)]
struct Piece {
    bytes: *const u8,
    len: usize,
}

/// The trie, once it was asked for.
static TRIE: SingleThread<Option<TokenTrie>> = SingleThread(RefCell::new(None));
static VOCABULARY: SingleThread<Option<usize>> = SingleThread(RefCell::new(None));

/// The first bytes of a blob, at most `size`.
fn read_start(blob: u32, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    // SAFETY: the host writes at most `size` bytes, which the list has.
    let len = unsafe { aici_host_read_blob(blob, bytes.as_mut_ptr(), size) };
    bytes.truncate(len);
    bytes
}

fn read(blob: u32) -> Vec<u8> {
    // SAFETY: with size 0 the host writes nothing.
    let len = unsafe { aici_host_read_blob(blob, core::ptr::null_mut(), 0) };
    read_start(blob, len)
}

pub(crate) fn argument() -> Vec<u8> {
    read(aici_host_module_arg())
}

pub(crate) fn process_argument() -> Vec<u8> {
    read(aici_host_process_arg())
}

pub(crate) fn trie() -> TokenTrie {
    let mut cached = TRIE.0.borrow_mut();
    let trie = cached.get_or_insert_with(|| match TokenTrie::new(read(aici_host_token_trie())) {
        Ok(trie) => trie,
        Err(error) => panic!("{error}"),
    });
    trie.clone()
}

pub(crate) fn vocabulary_size() -> usize {
    let mut cached = VOCABULARY.0.borrow_mut();
    *cached.get_or_insert_with(|| {
        // The header suffices, whatever the trie's size is.
        match Header::of(&read_start(aici_host_token_trie(), HEADER_BYTES)) {
            Some(header) => header.vocabulary,
            None => panic!("{}", crate::TrieError),
        }
    })
}

pub(crate) fn tokenize(text: &[u8]) -> Vec<Token> {
    // SAFETY: the pointer and the length are those of a slice.
    let blob = unsafe { aici_host_tokenize(text.as_ptr(), text.len()) };
    tokens_of(&read(blob))
}

fn tokens_of(bytes: &[u8]) -> Vec<Token> {
    let tokens = bytes.as_chunks::<4>().0.iter();
    tokens.map(|&token| u32::from_le_bytes(token)).collect()
}

pub(crate) fn sequence_id() -> SequenceId {
    aici_host_self_seq_id()
}

pub(crate) fn eos_token() -> Token {
    aici_host_eos_token()
}

pub(crate) fn config(name: &str) -> i32 {
    // SAFETY: the pointer and the length are those of a string.
    unsafe { aici_host_get_config(name.as_ptr(), name.len()) }
}

/// Hands a mask to the host; returns its handle, which the form P1 does not have.
pub(crate) fn return_mask(words: &[u32]) -> u32 {
    // SAFETY: the host reads one bit for each token of the vocabulary; masks have the vocabulary's size.
    #[cfg(not(feature = "p1"))]
    return unsafe { aici_host_return_logit_bias(words.as_ptr()) };
    // SAFETY: as above.
    #[cfg(feature = "p1")]
    unsafe {
        aici_host_return_logit_bias(words.as_ptr());
        0
    }
}

pub(crate) fn return_result(json: &str) {
    // SAFETY: the pointer and the length are those of a string.
    unsafe { aici_host_return_process_result(json.as_ptr(), json.len()) }
}

pub(crate) fn read_variable(name: &str) -> Reply {
    storage(&read_command(name))
}

pub(crate) fn write_variable(write: &Write<'_>) -> Reply {
    storage(&write_command(write))
}

fn storage(command: &str) -> Reply {
    // SAFETY: the pointer and the length are those of a string.
    let blob = unsafe { aici_host_storage_cmd(command.as_ptr(), command.len()) };
    match reply_of(&read(blob)) {
        Some(reply) => reply,
        None => panic!("the host's reply to a storage command has an unknown form"),
    }
}

pub(crate) fn log(text: &str) {
    let piece = Piece {
        bytes: text.as_ptr(),
        len: text.len(),
    };
    let mut written = 0;
    // SAFETY: the piece is a string's, and there is one. A host that cannot print is no reason to fail.
    unsafe { fd_write(1, &raw const piece, 1, &raw mut written) };
}

/// The log, for texts that are written in pieces.
pub(crate) struct Log;

impl fmt::Write for Log {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        log(text);
        Ok(())
    }
}

/// The functions of `sapwood`: constraints and masks in the host.
#[cfg(feature = "host")]
pub(crate) mod constraints {
    use alloc::string::String;
    use alloc::vec::Vec;

    use super::{read, tokens_of};
    use crate::Token;

    #[link(wasm_import_module = "sapwood")]
    unsafe extern "C" {
        fn constraint_new(kind: *const u8, kind_len: usize, value: *const u8, len: usize) -> u32;
        safe fn constraint_consume(handle: u32, token: Token) -> u32;
        safe fn constraint_rollback(handle: u32, tokens: u32);
        safe fn constraint_mask(handle: u32) -> u32;
        safe fn constraint_ff(handle: u32) -> u32;
        safe fn mask_and(left: u32, right: u32) -> u32;
        safe fn mask_or(left: u32, right: u32) -> u32;
        safe fn mask_not(mask: u32) -> u32;
        safe fn mask_return(mask: u32) -> u32;
        #[link_name = "prefix_mask"]
        fn sapwood_prefix_mask(bytes: *const u8, len: usize) -> u32;
        #[link_name = "free"]
        safe fn sapwood_free(handle: u32);
        #[link_name = "top_logits"]
        fn sapwood_top_logits(count: u32, target: *mut [u32; 2]) -> u32;
    }

    /// Has the reason why there is no constraint.
    const BLOB_ERROR: u32 = 6;

    pub(crate) fn open(kind: &str, pattern: &str) -> Result<u32, String> {
        // SAFETY: the pointers and lengths are those of strings.
        let handle =
            unsafe { constraint_new(kind.as_ptr(), kind.len(), pattern.as_ptr(), pattern.len()) };
        if handle == 0 {
            return Err(String::from_utf8_lossy(&read(BLOB_ERROR)).into_owned());
        }
        Ok(handle)
    }

    pub(crate) fn consume(handle: u32, token: Token) -> bool {
        constraint_consume(handle, token) != 0
    }

    pub(crate) fn rollback(handle: u32, tokens: u32) {
        constraint_rollback(handle, tokens);
    }

    pub(crate) fn mask(handle: u32) -> u32 {
        constraint_mask(handle)
    }

    pub(crate) fn forced(handle: u32) -> Vec<Token> {
        tokens_of(&read(constraint_ff(handle)))
    }

    pub(crate) fn prefix_mask(prefix: &[u8]) -> u32 {
        // SAFETY: the pointer and the length are those of a slice.
        unsafe { sapwood_prefix_mask(prefix.as_ptr(), prefix.len()) }
    }

    pub(crate) fn and(left: u32, right: u32) -> u32 {
        mask_and(left, right)
    }

    pub(crate) fn or(left: u32, right: u32) -> u32 {
        mask_or(left, right)
    }

    pub(crate) fn not(mask: u32) -> u32 {
        mask_not(mask)
    }

    pub(crate) fn return_held(mask: u32) -> u32 {
        mask_return(mask)
    }

    pub(crate) fn top_logits(count: usize) -> Vec<(Token, f32)> {
        // What the host has at most.
        const COUNT_MAX: usize = 64;
        let mut pairs = [[0; 2]; COUNT_MAX];
        let count = count.min(COUNT_MAX);
        // SAFETY: the host writes at most `count` pairs of 8 bytes, which the list has.
        let written = unsafe { sapwood_top_logits(count as u32, pairs.as_mut_ptr()) };
        let pairs = pairs.iter().take(written as usize);
        pairs
            .map(|&[token, bits]| (token, f32::from_bits(bits)))
            .collect()
    }

    pub(crate) fn free(handle: u32) {
        sapwood_free(handle);
    }
}
