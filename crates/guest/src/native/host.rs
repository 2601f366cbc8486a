//! The host's functions of a native run: those of the context in force on this thread.

use std::cell::RefCell;
use std::sync::Arc;

use super::{Model, VariableWrite, Variables, WriteOutcome};
#[cfg(test)]
use crate::Mask;
use crate::vars::{Reply, Write};
use crate::{SequenceId, Token, TokenTrie};

/// What one sequence's controller sees and leaves behind.
pub(crate) struct Context {
    model: Arc<dyn Model>,
    argument: Arc<str>,
    variables: Arc<dyn Variables>,
    pub(crate) sequence: SequenceId,
    pub(crate) logs: String,
    pub(crate) writes: Vec<VariableWrite>,
    /// Masks that the exports of a module returned; their handles are the indices.
    pub(crate) masks: Vec<Vec<u32>>,
}

impl Context {
    pub(crate) fn new(
        model: Arc<dyn Model>,
        argument: Arc<str>,
        variables: Arc<dyn Variables>,
    ) -> Self {
        Self {
            model,
            argument,
            variables,
            sequence: 0,
            logs: String::new(),
            writes: Vec::new(),
            masks: Vec::new(),
        }
    }

    pub(crate) fn fork(&self) -> Self {
        let mut forked = Self::new(
            Arc::clone(&self.model),
            Arc::clone(&self.argument),
            Arc::clone(&self.variables),
        );
        forked.sequence = self.sequence;
        forked
    }
}

thread_local! {
    /// The context of the controller that runs on this thread.
    static CURRENT: RefCell<Option<Context>> = const { RefCell::new(None) };
}

/// Runs `code`, which must not panic, with this context in force.
pub(crate) fn enter<T>(context: &mut Context, code: impl FnOnce() -> T) -> T {
    // The context moves, so that it needs neither a lock nor a count; what is left in its place is not used.
    let left = context.fork();
    let entered = std::mem::replace(context, left);
    let outer = CURRENT.replace(Some(entered));
    let result = code();
    if let Some(entered) = CURRENT.replace(outer) {
        *context = entered;
    }
    result
}

fn with<T>(use_context: impl FnOnce(&mut Context) -> T) -> T {
    CURRENT.with_borrow_mut(|current| match current {
        Some(context) => use_context(context),
        None => panic!(
            "the host's functions work only while a controller runs; see `sapwood_guest::testing`"
        ),
    })
}

pub(crate) fn argument() -> Vec<u8> {
    with(|context| context.argument.as_bytes().to_vec())
}

pub(crate) fn trie() -> TokenTrie {
    with(|context| context.model.trie())
}

pub(crate) fn vocabulary_size() -> usize {
    trie().vocabulary_size()
}

pub(crate) fn tokenize(text: &[u8]) -> Vec<Token> {
    with(|context| context.model.tokenize(text))
}

pub(crate) fn sequence_id() -> SequenceId {
    with(|context| context.sequence)
}

pub(crate) fn eos_token() -> Token {
    trie().eos_token()
}

pub(crate) fn config(name: &str) -> i32 {
    with(|context| context.model.config(name))
}

pub(crate) fn return_mask(words: &[u32]) -> u32 {
    with(|context| {
        context.masks.push(words.to_vec());
        context.masks.len() as u32 - 1
    })
}

pub(crate) fn read_variable(name: &str) -> Reply {
    with(|context| {
        context
            .variables
            .read(name)
            .map_or(Reply::Missing, Reply::Read)
    })
}

pub(crate) fn write_variable(write: &Write<'_>) -> Reply {
    let write = VariableWrite {
        name: write.name.to_owned(),
        value: write.value.to_vec(),
        append: write.append,
        when_version_is: write.when_version_is,
    };
    with(|context| match context.variables.write(&write) {
        WriteOutcome::Written(version) => {
            context.writes.push(write);
            Reply::Written(version)
        }
        WriteOutcome::OtherVersion(Some(value)) => Reply::Read(value),
        WriteOutcome::OtherVersion(None) => Reply::Missing,
        // The host ends such a callback at once.
        WriteOutcome::OverLimit(name) => panic!("storage limit: {name}"),
    })
}

pub(crate) fn log(text: &str) {
    with(|context| context.logs.push_str(text));
}

/// A mask that an export returned, by its handle.
#[cfg(test)]
pub(crate) fn returned_mask(handle: u32) -> Mask {
    with(|context| {
        Mask::from_words(
            context.masks[handle as usize].clone(),
            context.model.trie().vocabulary_size(),
        )
    })
}
