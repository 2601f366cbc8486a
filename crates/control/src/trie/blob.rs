//! The bytes of the token trie (AI-630): a header, the nodes in pre-order, the place of each token's bytes, the bytes.

use sapwood_proto::steer::Token;

const MAGIC: u32 = 0x558b_6fd3;
const HEADER_BYTES: u32 = 28;
const NO_TOKEN: u32 = 0x00FF_FFFF;
/// The root has no byte of its own; the format wants one.
const ROOT_BYTE: u8 = 0xFF;
/// A token's length has 8 bits, of which 255 means "longer" to readers (AI-631).
const TOKEN_BYTES_MAX: usize = 254;
/// A token's offset has 24 bits.
const TOKEN_DATA_MAX: usize = 0x00FF_FFFF;

/// The bytes of all tokens, ready to be written as a trie.
pub(super) struct TrieTokens {
    tokens: Vec<Vec<u8>>,
    /// Ids of the tokens with bytes, sorted by them; of equal ones only the last.
    sorted: Vec<Token>,
}

impl TrieTokens {
    pub(super) fn new(tokens: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut data_bytes = 0;
        let tokens: Vec<_> = tokens
            .map(|bytes| {
                if bytes.len() > TOKEN_BYTES_MAX || data_bytes + bytes.len() > TOKEN_DATA_MAX {
                    return Vec::new();
                }
                data_bytes += bytes.len();
                bytes
            })
            .collect();
        let mut sorted: Vec<Token> = (0..)
            .zip(&tokens)
            .filter(|(id, bytes)| !bytes.is_empty() && *id < NO_TOKEN)
            .map(|(id, _)| id)
            .collect();
        let bytes = |id: &Token| &tokens[*id as usize][..];
        // Of two tokens with equal bytes the later one is in the trie, as in the reference: with byte fallback, the
        // first of them is the byte token, which a tokenizer uses only where it has no other.
        sorted.sort_by(|left, right| bytes(left).cmp(bytes(right)).then(right.cmp(left)));
        sorted.dedup_by(|later, kept| bytes(later) == bytes(kept));
        Self { tokens, sorted }
    }

    /// The blob, with `eos` in its header.
    pub(super) fn blob(&self, eos: Token) -> Vec<u8> {
        let mut nodes = Vec::new();
        self.node(&mut nodes, ROOT_BYTE, &self.sorted, 0, 0);
        let data_bytes: usize = self.tokens.iter().map(Vec::len).sum();
        let sizes = [nodes.len() * 4, self.tokens.len() * 4, data_bytes];
        let mut blob = Vec::with_capacity(HEADER_BYTES as usize + sizes.iter().sum::<usize>());
        let header = [
            MAGIC,
            HEADER_BYTES,
            narrow(sizes[0]),
            narrow(sizes[1]),
            narrow(sizes[2]),
            narrow(self.tokens.len()),
            eos,
        ];
        put(&mut blob, header);
        put(&mut blob, nodes);
        let mut offset = 0;
        put(
            &mut blob,
            self.tokens.iter().map(|bytes| {
                let place = narrow(bytes.len()) | offset << 8;
                offset += narrow(bytes.len());
                place
            }),
        );
        blob.extend(self.tokens.iter().flatten());
        blob
    }

    /// Writes the node of `byte` and its subtree. `ids`: the tokens that begin with the `depth` bytes up to here.
    /// `pops`: how many levels a reader goes up after the last node of the subtree. Recurses once per byte of a token.
    fn node(&self, nodes: &mut Vec<u32>, byte: u8, ids: &[Token], depth: usize, pops: u32) {
        let at = nodes.len();
        let bytes = |id: &Token| &self.tokens[*id as usize][..];
        // The shortest sorts first, and there are no equal ones.
        let (token, mut rest) = match ids.split_first() {
            Some((first, rest)) if depth > 0 && bytes(first).len() == depth => (*first, rest),
            _ => (NO_TOKEN, ids),
        };
        nodes.extend([token << 8 | u32::from(byte), 0]);
        while let Some(first) = rest.first() {
            let next = bytes(first)[depth];
            let end = rest.partition_point(|id| bytes(id)[depth] == next);
            let (children, others) = rest.split_at(end);
            let child_pops = if others.is_empty() { pops + 1 } else { 1 };
            self.node(nodes, next, children, depth + 1, child_pops);
            rest = others;
        }
        let subtree = narrow((nodes.len() - at) / 2);
        nodes[at + 1] = subtree << 8 | pops;
    }
}

fn put(blob: &mut Vec<u8>, words: impl IntoIterator<Item = u32>) {
    blob.extend(words.into_iter().flat_map(u32::to_le_bytes));
}

/// All sizes here are bounded by 2^24 tokens of at most 254 bytes with at most 16 MiB in all.
fn narrow(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}
