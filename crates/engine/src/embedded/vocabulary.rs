//! The vocabulary of a loaded model: tables that are built once, and llama.cpp's tokenizer.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use sapwood_proto::steer::Token;

use super::marks::MarkFinder;
use super::{llama, tokenizer_json};
use crate::api::{self, ChatRequest, EngineError};
use crate::control_names::{self, cut};
use crate::gguf::GgufHeader;
use crate::infill::InfillTokens;
use crate::stop;
use crate::template::{self, SpecialTexts, Template, TemplateError, no_template};
use crate::token_bytes::TokenBytes;
use crate::tokenizer_json::AddedToken;

/// The maximum of characters of a run, of which a pre-tokenizer may make one match, that are passed to the tokenizer at once.
///
/// llama.cpp splits texts for some byte-pair vocabularies with a regular expression that recurses once per character of
/// a match; some thousand characters overflow the thread's stack and end the process. Ordinary text has no such runs,
/// except in writing systems without spaces; those are cut at punctuation.
const RUN_CHARS_MAX: usize = 1000;

/// A loaded model's vocabulary and chat template.
#[derive(Debug)]
pub(super) struct LlamaVocabulary {
    model: Arc<llama::LlamaModel>,
    bytes: TokenBytes,
    kinds: Vec<llama::TokenAttributes>,
    bos: Option<Token>,
    end_of_turn: Option<Token>,
    infill: Option<InfillTokens>,
    template: Option<Template>,
    special: SpecialTexts,
    /// Added tokens, which are found in every text.
    added: MarkFinder,
    /// Added tokens and control tokens.
    fixed: MarkFinder,
    /// The names of tokens that look like control tokens, which llama.cpp finds in plain text too.
    found_in_text: Vec<String>,
    splitting: Splitting,
    /// Its `tokenizer.json`.
    file: Option<Bytes>,
}

impl LlamaVocabulary {
    /// Builds the tables, and the `tokenizer.json` in advance. A template that does not parse is an error: otherwise
    /// the model would silently be unable to chat.
    pub(super) fn new(
        model: Arc<llama::LlamaModel>,
        header: &GgufHeader,
    ) -> Result<Self, TemplateError> {
        let mut bytes = TokenBytes::default();
        let mut special = SpecialTexts::default();
        // With `special`: control tokens have a text in templates, although they add none to an output.
        let text = |token: Option<Token>| {
            let piece = token
                .map(|token| model.piece(token, true))
                .unwrap_or_default();
            String::from_utf8_lossy(&piece).into_owned()
        };
        let (adds_bos, bos) = model.bos();
        special.bos = text(bos);
        special.end = text(model.end());
        let (mut kinds, mut fixed, mut found_in_text) = (Vec::new(), Vec::new(), Vec::new());
        for token in 0..model.size() {
            let kind = model.kind(token);
            // Control tokens get no bytes, so that they add nothing to the text of an output.
            if kind.control {
                special.all.push(text(Some(token)));
                bytes.push(&[]);
            } else {
                bytes.push(&model.piece(token, false));
            }
            if let Some(how) = model.added_token(token) {
                let name = model.text(token);
                if !how.control && control_names::looks_like_one(name.as_bytes()) {
                    special.all.push(name.clone());
                    found_in_text.push(name.clone());
                }
                fixed.push((name, how));
            }
            kinds.push(kind);
        }
        let template = match model.chat_template() {
            Some(source) => {
                let template = Template::new(&source, &special, SystemTime::now)?;
                // Only a template that takes too long is refused; see there.
                template.try_out()?;
                Some(template)
            }
            None => None,
        };
        let file = tokenizer_json::file(&model, header);
        if let Err(why) = &file {
            tracing::info!(%why, "the model's vocabulary is not offered as a tokenizer.json");
        }
        let marks = |of: &dyn Fn(&AddedToken) -> bool| {
            let those = fixed.iter().filter(|(_, how)| of(how));
            MarkFinder::new(those.map(|(text, how)| (text.clone(), how.takes_left)))
        };
        Ok(Self {
            added: marks(&|how| !how.control),
            fixed: marks(&|_| true),
            found_in_text,
            file: file.ok(),
            bytes,
            kinds,
            bos: bos.filter(|_| adds_bos),
            end_of_turn: end_of_turn(&model, header, &special.end),
            infill: infill(&model, bos.filter(|_| adds_bos)),
            splitting: Splitting::of(header),
            template,
            special,
            model,
        })
    }

    /// The same with this order of prompts for fill in the middle.
    pub(super) fn with_suffix_first(mut self, suffix_first: bool) -> Self {
        if let Some(infill) = &mut self.infill {
            infill.suffix_first = suffix_first;
        }
        self
    }

    /// Returns the texts of its control tokens.
    pub(super) fn special_texts(&self) -> &SpecialTexts {
        &self.special
    }

    /// Returns whether conversations can be rendered.
    pub(super) fn has_template(&self) -> bool {
        self.template.is_some()
    }
}

impl api::Vocabulary for LlamaVocabulary {
    fn size(&self) -> usize {
        self.kinds.len()
    }

    fn file(&self) -> Option<Bytes> {
        self.file.clone()
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        // Without `special` the texts of control tokens are plain text, so they are no border at which llama.cpp
        // splits.
        let (marks, names) = match special {
            true => (&self.fixed, &[][..]),
            false => (&self.added, &self.found_in_text[..]),
        };
        let mut tokens = Vec::new();
        let parts = marks.parts(text).into_iter();
        for part in parts.flat_map(|part| cut(part, names)) {
            // Other kinds of vocabularies do not recurse, and some add a space before each text, so their parts are not
            // cut further.
            if self.model.is_byte_pair() {
                for run in self.splitting.runs(part) {
                    if stop::stopped() {
                        return tokens;
                    }
                    tokens.append(&mut self.model.tokenize(run, special));
                }
            } else if stop::stopped() {
                return tokens;
            } else {
                tokens.append(&mut self.model.tokenize(part, special));
            }
        }
        tokens
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.bytes.get(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.kinds
            .get(token as usize)
            .is_some_and(|kind| kind.control)
    }

    fn name(&self, token: Token) -> Option<String> {
        let kind = self.kinds.get(token as usize)?;
        let piece = kind.control.then(|| self.model.piece(token, true))?;
        Some(String::from_utf8_lossy(&piece).into_owned())
    }

    fn is_end(&self, token: Token) -> bool {
        self.kinds.get(token as usize).is_some_and(|kind| kind.end)
    }

    fn bos(&self) -> Option<Token> {
        self.bos
    }

    fn infill(&self) -> Option<InfillTokens> {
        self.infill
    }

    fn end_of_turn(&self) -> Option<Token> {
        self.end_of_turn
    }

    fn chat_template(&self) -> Option<&str> {
        self.template.as_ref().map(Template::source)
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        let template = self.template.as_ref().ok_or_else(no_template)?;
        Ok(template::tokens(&template.render(chat)?, self))
    }
}

/// Returns the tokens for fill in the middle, if they can be used.
fn infill(model: &llama::LlamaModel, bos: Option<Token>) -> Option<InfillTokens> {
    let found = model.infill();
    let is_taken = |token| bos == Some(token) || model.kind(token).end;
    let usable = InfillTokens::of(found)
        .and_then(|infill| infill.unless_any(is_taken))
        .and_then(|infill| {
            let is_added = |token| model.added_token(token).is_some();
            infill.if_marks(is_added, |token| model.text(token))
        });
    if usable.is_none() && found.iter().all(Option::is_some) {
        tracing::warn!(
            tokens = ?found,
            "the model's tokens for fill in the middle are not used: two of them are the same, or one is a BOS or EOG token, \
             or an ordinary one"
        );
    }
    usable
}

/// Returns the token that ends a turn. If the file does not name it, llama.cpp takes any token with one of several names, of
/// which a vocabulary may have two; the one that the chat template writes after each message is EOS then.
fn end_of_turn(model: &llama::LlamaModel, header: &GgufHeader, eos_text: &str) -> Option<Token> {
    let is_named = header.number("tokenizer.ggml.eot_token_id").is_some();
    let template = model.chat_template().unwrap_or_default();
    let names_it = !eos_text.is_empty() && template.contains(eos_text);
    let is_written = names_it || template.contains("eos_token");
    match model.end() {
        Some(end) if !is_named && is_written => Some(end),
        // Models without a token for the end of a turn end it with EOS.
        end => model.end_of_turn().or(end),
    }
}

/// How a pre-tokenizer treats white space, as far as texts must be cut for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Splitting {
    Usual,
    /// It makes one match of several words.
    JoinsWords,
    /// It drops spaces. llama.cpp does not, and ends the process at two in a row, which it takes for letters to merge.
    DropsSpaces,
}

impl Splitting {
    fn of(header: &GgufHeader) -> Self {
        match header.text("tokenizer.ggml.pre") {
            Some("exaone-moe") => Self::JoinsWords,
            Some("whitespace") => Self::DropsSpaces,
            _ => Self::Usual,
        }
    }

    /// Cuts a text within runs longer than [`RUN_CHARS_MAX`], and nowhere else but at spaces that are dropped: ordinary text is one
    /// part.
    fn runs(self, text: &str) -> impl Iterator<Item = &str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            if self == Self::DropsSpaces {
                rest = rest.trim_start_matches(' ');
            }
            if rest.is_empty() {
                return None;
            }
            let end = match rest.find(' ') {
                Some(space) if self == Self::DropsSpaces => space,
                _ => rest.len(),
            };
            let border = run_border(&rest[..end], self == Self::JoinsWords);
            let (part, after) = rest.split_at(border);
            rest = after;
            Some(part)
        })
    }
}

/// Returns where the first overlong run of `text` is to be cut, or its end.
fn run_border(text: &str, joins_words: bool) -> usize {
    let mut runs = [Run::of_a_kind(), Run::of_line_ends_and_slashes()];
    let mut joined = joins_words.then(Run::of_joined_words);
    let mut before: Option<char> = None;
    for (at, c) in text.char_indices() {
        let mut all = runs.iter_mut().chain(&mut joined);
        if let Some(border) = all.find_map(|run| run.cut(before, at, c)) {
            return border;
        }
        before = Some(c);
    }
    text.len()
}

/// Successive characters of which a pre-tokenizer may make one match.
struct Run {
    /// Whether a run goes on from one character to the next.
    goes_on: fn(char, char) -> bool,
    /// Whether it is better to cut between these than anywhere, as fewer matches cross such places.
    is_border: fn(char, char) -> bool,
    length: usize,
    border: Option<usize>,
}

impl Run {
    fn new(goes_on: fn(char, char) -> bool, is_border: fn(char, char) -> bool) -> Self {
        Self {
            goes_on,
            is_border,
            length: 0,
            border: None,
        }
    }

    /// White space, or none: few matches have both.
    fn of_a_kind() -> Self {
        Self::new(
            |before, c| before.is_whitespace() == c.is_whitespace(),
            |before, c| before.is_alphabetic() != c.is_alphabetic(),
        )
    }

    /// `[\r\n/]*`, which ends punctuation in the patterns of Tekken, GPT-4o and others.
    fn of_line_ends_and_slashes() -> Self {
        fn is_one(c: char) -> bool {
            matches!(c, '\r' | '\n' | '/')
        }
        Self::new(|before, c| is_one(before) && is_one(c), |_, _| false)
    }

    /// `\p{L}\p{M}*(?: \p{L}\p{M}*)*`: the words of EXAONE's mixtures of experts.
    fn of_joined_words() -> Self {
        fn is_one(c: char) -> bool {
            c == ' ' || c.is_ascii_alphabetic() || !c.is_ascii()
        }
        Self::new(|before, c| is_one(before) && is_one(c), |_, c| c == ' ')
    }

    /// Counts a character. Returns where the run is to be cut, if it is too long with it.
    fn cut(&mut self, before: Option<char>, at: usize, c: char) -> Option<usize> {
        match before.filter(|&before| (self.goes_on)(before, c)) {
            None => (self.length, self.border) = (0, None),
            Some(_) if self.length == RUN_CHARS_MAX => return Some(self.border.unwrap_or(at)),
            Some(before) if (self.is_border)(before, c) => self.border = Some(at),
            Some(_) => {}
        }
        self.length += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_overlong_runs_are_cut() {
        let lengths = |text: &str| {
            Splitting::Usual
                .runs(text)
                .map(str::len)
                .collect::<Vec<_>>()
        };
        assert!(lengths("").is_empty());
        assert_eq!(lengths("ordinary text"), [13]);
        let words = "word ".repeat(10_000);
        assert_eq!(lengths(&words), [words.len()]);
        assert_eq!(lengths(&"é".repeat(RUN_CHARS_MAX)), [2 * RUN_CHARS_MAX]);
        assert_eq!(
            lengths(&"é".repeat(RUN_CHARS_MAX + 1)),
            [2 * RUN_CHARS_MAX, 2]
        );
        let spaces = format!("a{}b", " ".repeat(RUN_CHARS_MAX + 1));
        assert_eq!(lengths(&spaces), [1 + RUN_CHARS_MAX, 2]);
        let sentences = "\u{65e5}".repeat(20) + "\u{3002}";
        let cut = lengths(&sentences.repeat(100));
        assert!(
            cut.len() == 3 && cut[0] % sentences.len() == 0,
            "after a full stop: {cut:?}"
        );
    }

    #[test]
    fn runs_that_cross_white_space_are_cut_where_a_pre_tokenizer_has_them() {
        let lengths = |text: &str, of: Splitting| of.runs(text).map(str::len).collect::<Vec<_>>();
        let lines = "/\n".repeat(RUN_CHARS_MAX);
        assert_eq!(lengths(&lines, Splitting::Usual), [RUN_CHARS_MAX; 2]);
        let words = "word ".repeat(400);
        assert_eq!(lengths(&words, Splitting::Usual), [2_000]);
        // The last part begins with the space before a word.
        assert_eq!(lengths(&words, Splitting::JoinsWords), [999, 995, 6]);
        let sentences = "Some words, and others. ".repeat(400);
        assert_eq!(
            lengths(&sentences, Splitting::JoinsWords),
            [sentences.len()]
        );
        assert_eq!(lengths("  a  bc ", Splitting::DropsSpaces), [1, 2]);
    }
}
