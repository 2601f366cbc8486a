use super::*;

/// A reader as controllers have it: by skipping subtrees.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn node(&self, index: usize) -> (u32, u8, usize, u32) {
        let (first, second) = (self.word(28 + index * 8), self.word(32 + index * 8));
        (
            first >> 8,
            (first & 0xFF) as u8,
            (second >> 8) as usize,
            second & 0xFF,
        )
    }

    fn find(&self, bytes: &[u8]) -> Option<u32> {
        let mut at = 0;
        for wanted in bytes {
            let end = at + self.node(at).2;
            let mut child = at + 1;
            while child < end && self.node(child).1 != *wanted {
                child += self.node(child).2;
            }
            if child >= end {
                return None;
            }
            at = child;
        }
        Some(self.node(at).0)
    }

    fn token(&self, id: usize) -> &[u8] {
        let offsets = 28 + self.word(8) as usize;
        let data = offsets + self.word(12) as usize;
        let place = self.word(offsets + id * 4);
        let start = data + (place >> 8) as usize;
        &self.0[start..start + (place & 0xFF) as usize]
    }

    /// Walks all nodes in order as the reference does, by `pops` alone, and collects the tokens.
    fn walk(&self) -> Vec<(Vec<u8>, u32)> {
        let (mut path, mut found) = (Vec::new(), Vec::new());
        let count = self.node(0).2;
        for index in 1..count {
            let (token, byte, subtree, pops) = self.node(index);
            path.push(byte);
            if token != 0xFF_FFFF {
                found.push((path.clone(), token));
            }
            if subtree == 1 {
                path.truncate(path.len() - pops as usize);
            }
        }
        assert!(path.is_empty());
        found
    }
}

fn model(tokens: Vec<TokenEntry>) -> HostModel {
    HostModel::new(tokens, 1, |text: &str| {
        text.bytes().map(u32::from).collect()
    })
}

fn sample() -> HostModel {
    let mut tokens = vec![TokenEntry::special("<s>"), TokenEntry::special("</s>")];
    for text in ["b", "ab", "a", "abc", "ac", "b", "\u{e9}", "xyz"] {
        tokens.push(TokenEntry::text(text));
    }
    tokens.push(TokenEntry::text(vec![b'q'; 254]));
    tokens.push(TokenEntry::text(vec![b'q'; 255]));
    tokens.push(TokenEntry::text(vec![0xF0]));
    model(tokens)
}

/// AI-631
#[test]
fn ai_630_a_reader_finds_every_token_and_its_bytes() {
    let model = sample();
    let blob = model.trie(TokenView::Plain);
    let reader = Reader(blob);
    assert_eq!(&blob[..4], [0xd3, 0x6f, 0x8b, 0x55]);
    assert_eq!(
        (reader.word(4), reader.word(20), reader.word(24)),
        (28, 13, 1)
    );
    let sizes = reader.word(8) + reader.word(12) + reader.word(16);
    assert_eq!(blob.len(), 28 + sizes as usize);
    assert_eq!(
        reader.node(0),
        (0xFF_FFFF, 0xFF, reader.word(8) as usize / 8, 0)
    );
    // Token 2 has the bytes of 7, which came later.
    for id in [3, 4, 5, 6, 7, 8, 9, 10, 12] {
        assert_eq!(reader.find(reader.token(id)), Some(id as u32), "token {id}");
    }
    assert_eq!(reader.token(2), b"b");
    assert_eq!(reader.token(10).len(), 254);
    assert_eq!(reader.token(11), b"");
    assert_eq!(reader.find(b"xy"), Some(0xFF_FFFF));
    assert_eq!(reader.find(b"xa"), None);
    let mut walked = reader.walk();
    assert!(walked.is_sorted());
    walked.retain(|(bytes, token)| reader.token(*token as usize) == bytes);
    assert_eq!(walked.len(), 9);
}

#[test]
fn ai_631_special_tokens_are_empty_or_named() {
    let model = sample();
    let (plain, named) = (model.trie(TokenView::Plain), model.trie(TokenView::Named));
    assert_eq!(Reader(plain).token(0), b"");
    assert_eq!(Reader(named).token(0), b"\xff<s>");
    assert_eq!(Reader(named).find(b"\xff</s>"), Some(1));
    assert_eq!(Reader(plain).find(b"\xff"), None);
}

#[test]
fn ai_630_an_empty_vocabulary_is_a_root_alone() {
    let model = model(Vec::new());
    let blob = model.trie(TokenView::Plain);
    assert_eq!(blob.len(), 28 + 8);
    assert_eq!(Reader(blob).node(0), (0xFF_FFFF, 0xFF, 1, 0));
}

#[test]
fn ai_605_invalid_text_is_replaced_or_byte_tokens() {
    let model = sample();
    let replaced = "a\u{fffd}".bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(model.tokenize(b"a\xf0", TokenView::Plain), replaced);
    assert_eq!(
        model.tokenize(b"a\xf0b\xf1", TokenView::Named),
        [97, 12, 98]
    );
}
