//! The Rust programs of the README are whole, and are the examples that are built here. That they compile in a crate that has
//! only what the README names is checked by `tests/foreign/readme`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

const README: &str = include_str!("../../../README.md");
const EXAMPLES: [(&str, &str); 3] = [
    (
        "readme_client",
        include_str!("../examples/readme_client.rs"),
    ),
    (
        "readme_function",
        include_str!("../examples/readme_function.rs"),
    ),
    ("serve", include_str!("../examples/serve.rs")),
];

fn blocks(text: &str) -> Vec<&str> {
    let mut blocks = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("\n```rust") {
        let (_, after) = after.split_once('\n').unwrap();
        let (block, after) = after.split_once("```").unwrap();
        blocks.push(block);
        rest = after;
    }
    blocks
}

#[test]
fn the_programs_of_the_readme_are_complete_examples() {
    let blocks = blocks(README);
    assert_eq!(blocks.len(), EXAMPLES.len());
    for (block, (name, example)) in blocks.into_iter().zip(EXAMPLES) {
        // The first line of an example says what it is.
        let (_, program) = example.split_once("\n\n").unwrap();
        assert_eq!(block, program, "{name}");
        assert!(block.lines().all(|line| !line.starts_with("# ")), "{name}");
        assert!(block.contains("fn main()"), "{name}");
    }
}
