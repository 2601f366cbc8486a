//! The demo model of Sapwood: a very small language model, inside the binary that uses it.
//!
//! It exists so that a server can answer right after its installation, and so that tests can run a
//! real model without a download. It greets, names capitals, adds small numbers, writes JSON, calls
//! tools and explains Sapwood; it knows little else. The model card (`README.md`) says what it can and
//! cannot do, and `recipe/` trains it anew.
//!
//! ```
//! std::fs::write(std::env::temp_dir().join("sapwood-demo.gguf"), sapwood_demo::MODEL)?;
//! # Ok::<(), std::io::Error>(())
//! ```

/// The model's name, as the file's `general.name` has it.
pub const NAME: &str = "sapwood-demo";

/// The whole GGUF file: architecture `llama`, weights in `Q8_0`, tokenizer and chat template inside.
///
/// The bytes have no guaranteed alignment. A caller that needs one (a GGUF file aligns its tensors to 32
/// bytes) copies them into an aligned buffer, or writes them to a file and maps that.
// A static, so that the binary holds the bytes once: each use of a constant may have a copy of its own.
pub static MODEL: &[u8] = include_bytes!("../sapwood-demo.gguf");

#[cfg(test)]
mod tests {
    use super::{MODEL, NAME};

    // crates.io accepts 10 MB for a package (D-13); the rest is left to the recipe.
    const REGISTRY_ROOM: usize = 8 << 20;

    #[test]
    fn the_file_is_gguf_version_3() {
        assert_eq!(&MODEL[..8], b"GGUF\x03\0\0\0");
    }

    #[test]
    fn the_file_is_small_enough_for_the_registry() {
        assert!(MODEL.len() < REGISTRY_ROOM, "{} bytes", MODEL.len());
    }

    #[test]
    fn the_file_contains_the_name_of_the_model() {
        let head = &MODEL[..4096];
        assert!(
            head.windows(NAME.len())
                .any(|bytes| bytes == NAME.as_bytes())
        );
    }
}
