//! Scenarios with their results, as JSON: the same file checks a controller natively and its module in a host.

use std::collections::BTreeMap;

use super::{Run, Scenario};
use crate::json::Json;

/// A scenario, and what must come of it.
///
/// ```
/// use sapwood_guest::testing::Case;
///
/// let cases = Case::read(r#"[{
///     "controller": "yes",
///     "prompt": "Is water wet? ",
///     "preferred": ["no"],
///     "sequences": [{"text": "yes", "end": "stop"}]
/// }]"#)?;
/// assert_eq!(cases[0].controller, "yes");
/// # Ok::<(), String>(())
/// ```
///
/// Members that may be absent: `argument`, `variables` (name to text), and `logs` of a sequence. An end `failed: TEXT` is any
/// failure whose message has the text.
#[derive(Clone, Debug)]
pub struct Case {
    /// The controller's name.
    pub controller: String,
    /// What is run.
    pub scenario: Scenario,
    /// Text, end and logs of each sequence.
    sequences: Vec<[String; 3]>,
    variables: BTreeMap<String, String>,
}

/// How the end of a sequence that failed begins.
const FAILED: &str = "failed: ";

impl Case {
    /// Reads a list of cases.
    ///
    /// # Errors
    /// The text is no such list; the error says where.
    pub fn read(json: &str) -> Result<Vec<Self>, String> {
        let json = Json::parse(json).map_err(|error| error.to_string())?;
        let cases = json.elements().iter().zip(1..);
        cases
            .map(|(case, number)| {
                Self::of(case).ok_or_else(|| format!("case {number} lacks a member"))
            })
            .collect()
    }

    fn of(case: &Json) -> Option<Self> {
        let text = |name| case.get(name).map_or(Some(""), Json::as_str);
        let preferred: Option<Vec<&str>> = case
            .get("preferred")?
            .elements()
            .iter()
            .map(Json::as_str)
            .collect();
        let sequences = case.get("sequences")?.elements().iter().map(|sequence| {
            let text = |name| {
                sequence
                    .get(name)
                    .map_or(Some(""), Json::as_str)
                    .map(str::to_owned)
            };
            Some([text("text")?, text("end")?, text("logs")?])
        });
        let variables = match case.get("variables") {
            Some(Json::Object(variables)) => &variables[..],
            _ => &[],
        };
        let variables = variables
            .iter()
            .map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
        Some(Self {
            controller: case.get("controller")?.as_str()?.to_owned(),
            scenario: Scenario::new(text("prompt")?)
                .argument(text("argument")?)
                .prefers(preferred?),
            sequences: sequences.collect::<Option<_>>()?,
            variables: variables.collect::<Option<_>>()?,
        })
    }

    /// Compares a run with what must come of the case.
    ///
    /// # Errors
    /// They differ; the error shows how.
    pub fn check(&self, run: &Run) -> Result<(), String> {
        let sequences: Vec<_> = run
            .sequences
            .iter()
            .zip(&self.sequences)
            .map(|(sequence, expected)| {
                let mut found = [
                    sequence.text.clone(),
                    sequence.end.to_string(),
                    sequence.logs.clone(),
                ];
                // A host adds where a panic was to its message, and to the logs.
                if expected[1]
                    .strip_prefix(FAILED)
                    .is_some_and(|message| found[1].contains(message))
                {
                    found[1..].clone_from_slice(&expected[1..]);
                }
                found
            })
            .collect();
        let variables = run
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), value.text()))
            .collect();
        let is_equal = run.sequences.len() == self.sequences.len() && sequences == self.sequences;
        if is_equal && self.variables == variables {
            return Ok(());
        }
        Err(format!(
            "{}: expected {:#?} and variables {:#?}, not {sequences:#?} and {variables:#?}",
            self.controller, self.sequences, self.variables
        ))
    }
}
