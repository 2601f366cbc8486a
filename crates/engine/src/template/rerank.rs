//! [`RerankTemplate`]: the text that a query and a document are written into, for models that score such pairs.

use sapwood_proto::steer::Token;

use super::shield::{CoveredTexts, SpecialTextShield};
use super::{SOURCE_BYTES_MAX, SpecialTexts, TemplateError, tokens};
use crate::api::Vocabulary;

const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";
/// The maximum of places for either: what is written into them may be long.
const PLACES_MAX: usize = 4;

/// A text with places for a query and a document, as GGUF files have it under the name `rerank`. Texts of control tokens
/// become those tokens in the template, and never in what is written into it.
#[derive(Clone, Debug)]
pub struct RerankTemplate {
    source: String,
    shield: SpecialTextShield,
}

impl RerankTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// If it is too long, or has no place for a query or a document, or too many.
    pub fn new(source: &str, special: &SpecialTexts) -> Result<Self, TemplateError> {
        let wrong = |why: &str| Err(TemplateError::Syntax(why.to_owned()));
        if source.len() > SOURCE_BYTES_MAX {
            return wrong("it is too long");
        }
        if !source.contains(QUERY) || !source.contains(DOCUMENT) {
            return wrong("it has no {query} or no {document}");
        }
        if [QUERY, DOCUMENT]
            .iter()
            .any(|it| source.matches(it).count() > PLACES_MAX)
        {
            return wrong("it has too many {query} or {document}");
        }
        let shield = SpecialTextShield::new(&special.all)?;
        Ok(Self {
            source: source.to_owned(),
            shield,
        })
    }

    /// Returns the tokens of a pair.
    pub fn tokens(
        &self,
        query: &str,
        document: &str,
        vocabulary: &(impl Vocabulary + ?Sized),
    ) -> Vec<Token> {
        let mut covered = CoveredTexts::default();
        let query = self.shield.cover_all(query, &mut covered);
        let document = self.shield.cover_all(document, &mut covered);
        let mut text = String::new();
        let mut rest = self.source.as_str();
        // In one pass: a query may contain the mark of the document.
        while let Some(found) = rest.find('{') {
            text.push_str(&rest[..found]);
            rest = &rest[found..];
            if let Some(after) = rest.strip_prefix(QUERY) {
                text.push_str(&query);
                rest = after;
            } else if let Some(after) = rest.strip_prefix(DOCUMENT) {
                text.push_str(&document);
                rest = after;
            } else {
                text.push('{');
                rest = &rest[1..];
            }
        }
        text.push_str(rest);
        tokens(&covered.pieces(&text), vocabulary)
    }
}
