//! Fuzz entry points: arbitrary bytes as modules, results of callbacks, messages and shared memory. Built for tests and
//! fuzzing only.
//!
//! Each stands beside the code that it explores; the bytes are read by [`Choices`], so that a short input already is a
//! long list of operations.

pub use crate::host::fuzz::results as controller_results;
pub use crate::module::fuzz::module as controller_module;
#[cfg(target_os = "linux")]
pub use crate::remote::fuzz::reply as runtime_reply;
#[cfg(target_os = "linux")]
pub use crate::runtime::fuzz::messages as runtime_messages;
#[cfg(target_os = "linux")]
pub use crate::wire::fuzz::slots as shared_memory;

/// Reads choices from bytes. After their end every choice is the first one.
#[derive(Clone, Debug)]
pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next byte, 0 after the end.
    pub(crate) fn byte(&mut self) -> u8 {
        self.next_byte().unwrap_or(0)
    }

    /// The next byte.
    pub(crate) fn next_byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// A number below `limit`, which is at most 256.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit.max(1)
    }

    pub(crate) fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// As many bytes as the next one or two say, or all that are left.
    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let length = match self.byte() {
            short @ 0..=127 => usize::from(short),
            long => usize::from(long & 127) << 8 | usize::from(self.byte()),
        };
        let (bytes, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Everything that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    type Target = (&'static str, fn(&[u8]));

    const TARGETS: &[Target] = &[
        ("controller_module", super::controller_module),
        ("controller_results", super::controller_results),
        #[cfg(target_os = "linux")]
        ("runtime_messages", super::runtime_messages),
        #[cfg(target_os = "linux")]
        ("runtime_reply", super::runtime_reply),
        #[cfg(target_os = "linux")]
        ("shared_memory", super::shared_memory),
    ];

    #[test]
    fn the_corpus_is_replayed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
        for (target, run) in TARGETS {
            let files = std::fs::read_dir(format!("{folder}{target}"));
            let files = files.expect("a committed corpus");
            let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
            assert!(!files.is_empty(), "{target}");
            for file in files {
                run(&std::fs::read(file).unwrap());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

        /// AI-305, AI-853, AI-601, AI-221
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            for (_, run) in TARGETS {
                run(&bytes);
            }
        }
    }
}
