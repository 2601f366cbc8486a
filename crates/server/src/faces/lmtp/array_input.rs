//! The input of a request body that is one JSON array of pairs (LM-113).
//!
//! The text is kept, and each pair is parsed when its turn comes: as separate messages, the smallest pairs would take
//! twelve times the bytes of the body.

use bytestring::ByteString;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::driver::LmtpInput;

/// What is left of an array that was found to be valid.
pub(super) struct ArrayInput {
    text: ByteString,
    /// Where the next pair, the comma before it or the end of the array stands.
    at: usize,
}

impl ArrayInput {
    /// Checks the whole text, which takes its time for a long one.
    ///
    /// # Errors
    /// Why it is no array of pairs, for the client.
    pub(super) fn new(text: ByteString) -> Result<Self, String> {
        let pairs: PairCount = serde_json::from_str(&text)
            .map_err(|error| format!("The body is no JSON array of pairs ({error})"))?;
        if pairs.0 == 0 {
            return Err("The array is empty".to_owned());
        }
        let at = text.find('[').map_or(text.len(), |start| start + 1);
        Ok(Self { text, at })
    }

    /// The next pair as a line, or the end, with which the text is dropped. The white space within a payload stays, line feeds included.
    pub(super) fn next_input(&mut self) -> LmtpInput {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let rest = rest.trim_start_matches([' ', '\t', '\r', '\n', ',']);
        // The payload stays raw: the session parses it by its own rules, and an error in it is a line of the answer.
        let mut pairs = serde_json::Deserializer::from_str(rest).into_iter::<(String, &RawValue)>();
        // The end of the array is no pair, and everything before it was checked.
        let Some(Ok((word, payload))) = pairs.next() else {
            (self.text, self.at) = (ByteString::new(), 0);
            return LmtpInput::End;
        };
        let line = format!("{word} {}", payload.get()).into();
        self.at = self.text.len() - rest.len() + pairs.byte_offset();
        LmtpInput::Text(line)
    }
}

/// The number of pairs of an array, of which nothing is kept.
struct PairCount(usize);

impl<'de> Deserialize<'de> for PairCount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> Visitor<'de> for Count {
            type Value = PairCount;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("an array of pairs")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pairs: A) -> Result<PairCount, A::Error> {
                let mut count = 0;
                while pairs.next_element::<(String, IgnoredAny)>()?.is_some() {
                    count += 1;
                }
                Ok(PairCount(count))
            }
        }
        from.deserialize_seq(Count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        let mut input = ArrayInput::new(text.to_owned().into()).unwrap();
        let next = std::iter::from_fn(|| match input.next_input() {
            LmtpInput::Text(line) => Some(line.to_string()),
            _ => None,
        });
        next.collect()
    }

    #[test]
    fn lm_113_each_pair_of_an_array_is_a_message() {
        for text in [
            r#"[["GENERATE",{"a":[1,"]"]}],["CANCEL",{"b":","}]]"#,
            "  \n[ [\"GENERATE\",{\"a\":[1,\"]\"]} ]\t,\r\n [ \"CANCEL\" , {\"b\":\",\"}]\n] \n",
        ] {
            assert_eq!(
                lines(text),
                [r#"GENERATE {"a":[1,"]"]}"#, r#"CANCEL {"b":","}"#]
            );
        }
        // An escape in a word, white space in a payload, and payloads that are no objects.
        assert_eq!(
            lines("[[\"A\\u0042\",{\n\"k\": 1}],[\"\",0]]"),
            ["AB {\n\"k\": 1}", " 0"]
        );
    }

    #[test]
    fn lm_113_what_is_no_array_of_pairs_is_refused_as_a_whole() {
        for text in [
            "",
            "[",
            "[]",
            "{}",
            "0",
            r#"["A",{}]"#,
            r#"[["A"]]"#,
            r#"[["A",{},1]]"#,
            r#"[[1,{}]]"#,
            r#"[["A",{}],]"#,
            r#"[["A",{}] ["B",{}]]"#,
            r#"[["A",{}]]]"#,
            r#"[["A",{"k":}]]"#,
        ] {
            assert!(ArrayInput::new(text.into()).is_err(), "{text}");
        }
    }
}
