//! Fuzz entry points: arbitrary bytes for the parsers of this crate. Built for tests and fuzzing only.

pub use crate::faces::generate::fuzz::{decompress, grpc};
pub use crate::websocket::fuzz::websocket;

#[cfg(test)]
mod tests {
    fn replay(target: &str, run: fn(&[u8])) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
        let files = std::fs::read_dir(format!("{folder}{target}")).expect("a committed corpus");
        let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty());
        for file in files {
            run(&std::fs::read(file).unwrap());
        }
    }

    #[test]
    fn the_corpus_is_replayed() {
        replay("decompress", super::decompress);
        replay("generate_grpc", super::grpc);
        replay("generate_message", super::grpc);
        replay("websocket_read", super::websocket);
    }
}
