//! [`DraftModel`]: a small model that drafts tokens for a larger one of the same vocabulary.

use sapwood_proto::steer::Token;

use crate::api::Vocabulary;
use crate::model::Model;

/// The vocabularies of two models of one family may differ in so many unused tokens at their end, as in llama.cpp.
const SIZE_DIFFERENCE_MAX: usize = 128;
/// The first tokens are often placeholders, which files name differently; llama.cpp begins to compare here.
const COMPARED_FROM: Token = 5;

/// Why a model cannot draft for another one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DraftMismatch {
    /// Rejected tokens could not be taken back.
    #[error(
        "the state of a model of architecture {0:?} cannot be truncated behind rejected tokens: choose another draft model"
    )]
    Draft(String),
    /// Of the model for which it would draft they could not either.
    #[error(
        "nothing is drafted for a model of architecture {0:?}, whose state cannot be truncated behind rejected tokens: \
         leave draft_model out"
    )]
    Target(String),
    /// The numbers of tokens differ too much.
    #[error(
        "its vocabulary has {draft} tokens and that of the model has {target}: choose a draft model of the same family"
    )]
    Size {
        /// Tokens of the draft model.
        draft: usize,
        /// Tokens of the other model.
        target: usize,
    },
    /// The same number means different tokens.
    #[error(
        "token {0} of its vocabulary differs from that of the model: choose a draft model of the same family"
    )]
    Token(Token),
    /// The tokens that begin or end texts differ.
    #[error(
        "its {0} token differs from that of the model: choose a draft model of the same family"
    )]
    Special(&'static str),
}

/// A model whose tokens were found to be those of the model for which it drafts.
pub struct DraftModel {
    pub(crate) model: Box<dyn Model>,
    /// A draft ends before a token that the draft model gives less than this probability.
    pub(crate) p_min: f32,
    /// Tokens below this number are in both vocabularies.
    pub(crate) common_tokens: Token,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel")
            .field("model", &self.model.info().name)
            .field("p_min", &self.p_min)
            .finish_non_exhaustive()
    }
}

impl DraftModel {
    /// Lets `model` draft for `target`. Its drafts end before a token that it gives a probability below `p_min`, from 0 to 1.
    ///
    /// # Errors
    /// [`DraftMismatch`]: it cannot.
    pub fn new(
        model: Box<dyn Model>,
        target: &dyn Model,
        p_min: f32,
    ) -> Result<Self, DraftMismatch> {
        let (info, other) = (model.info(), target.info());
        if !other.truncates {
            return Err(DraftMismatch::Target(other.architecture));
        }
        if !info.truncates {
            return Err(DraftMismatch::Draft(info.architecture));
        }
        let common_tokens = compare(&*model.vocabulary(), &*target.vocabulary())?;
        Ok(Self {
            model,
            p_min: p_min.clamp(0.0, 1.0),
            common_tokens,
        })
    }
}

/// Compares the numbers of tokens of a draft model and of its target.
pub(crate) fn compare_sizes(draft: usize, target: usize) -> Result<(), DraftMismatch> {
    if draft.abs_diff(target) > SIZE_DIFFERENCE_MAX {
        return Err(DraftMismatch::Size { draft, target });
    }
    Ok(())
}

/// Compares two vocabularies; returns how many tokens they have in common.
fn compare(draft: &dyn Vocabulary, target: &dyn Vocabulary) -> Result<Token, DraftMismatch> {
    let sizes = [draft.size(), target.size()];
    compare_sizes(sizes[0], sizes[1])?;
    if draft.bos() != target.bos() {
        return Err(DraftMismatch::Special("BOS"));
    }
    // Files of one family may name different ones of several such tokens.
    if let (Some(own), Some(other)) = (draft.end_of_turn(), target.end_of_turn())
        && !draft.is_end(other)
        && !target.is_end(own)
    {
        return Err(DraftMismatch::Special("end-of-turn"));
    }
    let common = Token::try_from(sizes[0].min(sizes[1])).unwrap_or(Token::MAX);
    let is_same = |&token: &Token| {
        let bytes = draft.bytes(token);
        bytes == target.bytes(token)
            // Control tokens have no bytes, but names.
            && (!bytes.is_empty() || draft.name(token) == target.name(token))
    };
    match (COMPARED_FROM..common).find(|token| !is_same(token)) {
        Some(token) => Err(DraftMismatch::Token(token)),
        None => Ok(common),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{ChatRequest, EngineError};
    use crate::scripted::{Config as Script, Scripted, ScriptedTokenizer};

    fn model(script: Script) -> Box<dyn Model> {
        Box::new(Scripted::new(script).unwrap())
    }

    fn words(vocab: u32) -> Script {
        Script {
            tokenizer: Some(ScriptedTokenizer::Words),
            vocab,
            ..Script::default()
        }
    }

    #[test]
    fn a_model_drafts_for_those_with_its_vocabulary() {
        let fixed = Script {
            truncates: false,
            ..words(2_000)
        };
        let scripted = || "scripted".to_owned();
        for (draft, target, expected) in [
            (words(2_000), words(2_000), Ok(2_000)),
            (words(2_000), words(2_128), Ok(2_000)),
            (words(2_128), words(2_000), Ok(2_000)),
            (
                words(2_000),
                words(2_129),
                Err(DraftMismatch::Size {
                    draft: 2_000,
                    target: 2_129,
                }),
            ),
            (
                fixed.clone(),
                words(2_000),
                Err(DraftMismatch::Draft(scripted())),
            ),
            (words(2_000), fixed, Err(DraftMismatch::Target(scripted()))),
        ] {
            let made = DraftModel::new(model(draft), &*model(target), 0.5);
            assert_eq!(made.map(|made| made.common_tokens), expected);
        }
    }

    /// Bytes, where one token may be another one, and the special ones others.
    struct Altered {
        changed: Option<Token>,
        bos: Option<Token>,
        end: Option<Token>,
    }

    impl Vocabulary for Altered {
        fn size(&self) -> usize {
            BYTES.len()
        }

        fn tokenize(&self, text: &str, _: bool) -> Vec<Token> {
            text.bytes().map(Token::from).collect()
        }

        fn bytes(&self, token: Token) -> &[u8] {
            let shown = if self.changed == Some(token) {
                7
            } else {
                token
            };
            &BYTES[shown as usize..=shown as usize]
        }

        fn is_special(&self, _: Token) -> bool {
            false
        }

        fn is_end(&self, token: Token) -> bool {
            self.end == Some(token)
        }

        fn bos(&self) -> Option<Token> {
            self.bos
        }

        fn end_of_turn(&self) -> Option<Token> {
            self.end
        }

        fn chat(&self, _: &ChatRequest) -> Result<Vec<Token>, EngineError> {
            Ok(Vec::new())
        }
    }

    const BYTES: [u8; 32] = {
        let mut bytes = [0; 32];
        let mut at = 0;
        while at < 32 {
            bytes[at] = at as u8;
            at += 1;
        }
        bytes
    };

    #[test]
    fn tokens_are_compared_by_their_bytes_and_special_ones_by_their_numbers() {
        let usual = |changed| Altered {
            changed,
            bos: Some(1),
            end: Some(2),
        };
        let with = |bos, end| Altered {
            bos,
            end,
            ..usual(None)
        };
        for (draft, expected) in [
            (usual(None), Ok(32)),
            // Placeholders.
            (usual(Some(4)), Ok(32)),
            (usual(Some(5)), Err(DraftMismatch::Token(5))),
            (usual(Some(31)), Err(DraftMismatch::Token(31))),
            (with(None, Some(2)), Err(DraftMismatch::Special("BOS"))),
            (with(Some(1), None), Ok(32)),
            (
                with(Some(1), Some(3)),
                Err(DraftMismatch::Special("end-of-turn")),
            ),
        ] {
            assert_eq!(compare(&draft, &usual(None)), expected);
        }
    }
}
