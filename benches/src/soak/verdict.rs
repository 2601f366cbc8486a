//! [`compare`]: whether an answer is that of the reference, and [`SoakTotals`], how often it was.
//!
//! With cells of its own for each slot, every answer is equal to the last bit. Where slots share cells, llama.cpp puts a sequence's
//! tokens into any free ones, attention sums them up in the order of the cells, and greedy sampling may take the other one of two
//! tokens that are nearly as probable. From there on the texts have nothing in common. Such a difference is counted, and accepted if the
//! reference itself has the two close together.

use std::fmt;

use super::answer::{Position, SoakAnswer, SoakChoice};
use super::question::Errand;

/// Log-probabilities that differ by more are not due to rounding. With SmolLM2-135M, Q4_1, those of one request to llama-server
/// alone differ by 0.26 between `--ubatch-size` 512 and 24; and the distance of two tokens by 0.27 between its attention and ours.
pub const LOGPROB_TOLERANCE: f64 = 1.0;

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Equal tokens, with log-probabilities that differ by at most this.
    Same(f64),
    /// The first different token is nearly as probable as that of the reference.
    NearTie(String),
    /// Anything else.
    Different(String),
}

/// Compares an answer with that of the reference. With `sampled`, the first different token may be any: a random number
/// that lies at a border of two tokens gives either.
#[must_use]
pub fn compare(reference: &SoakAnswer, found: &SoakAnswer, sampled: bool) -> Verdict {
    if reference.choices.len() != found.choices.len() {
        let count = [reference, found].map(|answer| answer.choices.len());
        return Verdict::Different(format!("{} choices, and not {}", count[1], count[0]));
    }
    let mut whole = Verdict::Same(0.0);
    for (reference, found) in reference.choices.iter().zip(&found.choices) {
        let verdict = compare_choice(reference, found, sampled);
        whole = match (whole, verdict) {
            (Verdict::Same(one), Verdict::Same(other)) => Verdict::Same(one.max(other)),
            (Verdict::Same(_), other) => other,
            (_, Verdict::Different(why)) => return Verdict::Different(why),
            (whole, _) => whole,
        };
    }
    whole
}

fn compare_choice(reference: &SoakChoice, found: &SoakChoice, sampled: bool) -> Verdict {
    let mut most = 0.0_f64;
    // Without log-probabilities only the text is compared.
    for (place, (expect, token)) in reference.tokens.iter().zip(&found.tokens).enumerate() {
        let (expected, token) = (&expect.chosen, &token.chosen);
        if expected.id != token.id {
            let other = expect.others.iter().find(|it| it.id == token.id);
            let near = other.is_some_and(|it| is_near(expect, it.logprob));
            let what = format!("token {place} is {token:?}, and not {expected:?}");
            return tie(what, near || sampled, reference, found);
        }
        let difference = (expected.logprob - token.logprob).abs();
        if difference > LOGPROB_TOLERANCE {
            return Verdict::Different(format!(
                "the log-probability of token {place}, {:?}, is {}, and not {}: {}",
                token.text,
                token.logprob,
                expected.logprob,
                both(reference, found)
            ));
        }
        most = most.max(difference);
    }
    let same = |one: &str, other: &str| one == other;
    if same(&reference.text, &found.text) && same(&reference.finish_reason, &found.finish_reason) {
        return Verdict::Same(most);
    }
    if found.tokens.is_empty() {
        let near = sampled || is_near_in_text(reference, &found.text);
        return tie("the text differs".to_owned(), near, reference, found);
    }
    Verdict::Different(format!(
        "equal tokens with another end: {}",
        both(reference, found)
    ))
}

fn tie(what: String, near: bool, reference: &SoakChoice, found: &SoakChoice) -> Verdict {
    if near {
        Verdict::NearTie(what)
    } else {
        Verdict::Different(format!("{what}: {}", both(reference, found)))
    }
}

fn both(reference: &SoakChoice, found: &SoakChoice) -> String {
    format!(
        "{:?} ({}), and alone {:?} ({})",
        found.text, found.finish_reason, reference.text, reference.finish_reason
    )
}

fn is_near(expect: &Position, logprob: f64) -> bool {
    expect.chosen.logprob - logprob <= LOGPROB_TOLERANCE
}

/// Returns whether the text goes on with a candidate that is nearly as probable, where it leaves that of the reference or before: several
/// tokens may begin alike.
fn is_near_in_text(reference: &SoakChoice, found: &str) -> bool {
    let mut rest = found;
    for position in &reference.tokens {
        let mut near = position
            .others
            .iter()
            .filter(|it| is_near(position, it.logprob) && it.id != position.chosen.id);
        // A candidate without a text ends it.
        let goes_on = near.any(|it| match it.text.is_empty() {
            true => rest.is_empty(),
            false => rest.starts_with(&it.text),
        });
        if goes_on {
            return true;
        }
        // A token that the text does not show, at the end: the text may go on with another.
        let ends = position.chosen.text.is_empty();
        match rest.strip_prefix(position.chosen.text.as_str()) {
            Some(after) if !ends => rest = after,
            _ => return false,
        }
    }
    false
}

/// The comparisons of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counts {
    done: u64,
    compared: u64,
    near: u64,
}

/// What the clients have done and found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SoakTotals {
    counts: [Counts; Errand::ALL.len()],
    /// The largest difference of log-probabilities of equal tokens.
    most: f64,
    /// The first accepted difference.
    first: Option<String>,
}

impl SoakTotals {
    /// Counts an errand without a comparison.
    pub fn done(&mut self, errand: Errand) {
        self.counts[errand as usize].done += 1;
    }

    /// Counts a comparison that has not failed; returns why if it has.
    ///
    /// # Errors
    /// The difference.
    pub fn compared(&mut self, errand: Errand, verdict: Verdict) -> Result<(), String> {
        let counts = &mut self.counts[errand as usize];
        counts.compared += 1;
        match verdict {
            Verdict::Same(most) => self.most = self.most.max(most),
            Verdict::NearTie(what) => {
                counts.near += 1;
                self.first.get_or_insert(what);
            }
            Verdict::Different(why) => return Err(why),
        }
        Ok(())
    }

    /// Adds those of another client.
    pub fn add(&mut self, other: Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            mine.done += theirs.done;
            mine.compared += theirs.compared;
            mine.near += theirs.near;
        }
        self.most = self.most.max(other.most);
        self.first = self.first.take().or(other.first);
    }

    /// Judges differences that were accepted, of a server whose answers are equal to the last bit.
    ///
    /// # Errors
    /// If there was one.
    pub fn judge_exact(&self) -> Result<(), String> {
        let near: u64 = self.counts.iter().map(|counts| counts.near).sum();
        if near > 0 || self.most > 0.0 {
            let most = self.most;
            return Err(format!(
                "{near} answers differ, and log-probabilities of equal tokens by {most}"
            ));
        }
        Ok(())
    }
}

impl fmt::Display for SoakTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (errand, counts) in Errand::ALL.iter().zip(self.counts) {
            let Counts {
                done,
                compared,
                near,
            } = counts;
            writeln!(
                f,
                "{errand:?}: {done} done, {compared} compared, {near} near ties"
            )?;
        }
        write!(
            f,
            "equal tokens: log-probabilities differ by {:.4} at most",
            self.most
        )?;
        match &self.first {
            Some(first) => write!(f, "; first near tie: {first}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::Candidate;
    use super::*;

    fn candidate(id: u32, logprob: f64) -> Candidate {
        let text = format!(" {id}");
        Candidate { id, logprob, text }
    }

    /// An answer of these tokens, each beside one that is less probable by the second number.
    fn answer(tokens: &[(u32, f64)]) -> SoakAnswer {
        let tokens: Vec<Position> = tokens
            .iter()
            .map(|&(id, gap)| Position {
                chosen: candidate(id, -0.5),
                others: vec![candidate(id + 100, -0.5 - gap)],
            })
            .collect();
        let text = tokens.iter().map(|it| it.chosen.text.as_str()).collect();
        let finish_reason = "length".to_owned();
        SoakAnswer {
            choices: vec![SoakChoice {
                text,
                tokens,
                finish_reason,
            }],
        }
    }

    fn without_tokens(mut answer: SoakAnswer) -> SoakAnswer {
        answer.choices[0].tokens.clear();
        answer
    }

    #[test]
    fn equal_answers_are_the_same_with_and_without_their_tokens() {
        let one = answer(&[(1, 1.0), (2, 1.0)]);
        assert_eq!(compare(&one, &one, false), Verdict::Same(0.0));
        assert_eq!(
            compare(&one, &without_tokens(one.clone()), false),
            Verdict::Same(0.0)
        );
    }

    #[test]
    fn only_a_token_that_is_nearly_as_probable_may_take_the_place_of_another() {
        for (gap, near) in [(0.9, true), (1.1, false)] {
            let reference = answer(&[(1, 1.0), (2, gap), (3, 1.0)]);
            let other = answer(&[(1, 1.0), (102, 1.0), (7, 1.0)]);
            for found in [other.clone(), without_tokens(other)] {
                let verdict = compare(&reference, &found, false);
                assert_eq!(matches!(verdict, Verdict::NearTie(_)), near, "{verdict:?}");
                assert_eq!(
                    matches!(verdict, Verdict::Different(_)),
                    !near,
                    "{verdict:?}"
                );
            }
        }
        let (reference, other) = (answer(&[(1, 0.1)]), answer(&[(55, 0.1)]));
        assert!(matches!(
            compare(&reference, &other, false),
            Verdict::Different(_)
        ));
        assert!(matches!(
            compare(&reference, &other, true),
            Verdict::NearTie(_)
        ));
    }

    /// The end of the text is such a candidate.
    #[test]
    fn a_candidate_without_a_text_makes_no_other_text_near() {
        let mut reference = answer(&[(1, 1.0), (2, 0.1)]);
        reference.choices[0].tokens[1].others[0].text.clear();
        for (text, near) in [(" 1", true), (" 1 7", false)] {
            let mut found = without_tokens(answer(&[(1, 1.0)]));
            text.clone_into(&mut found.choices[0].text);
            let verdict = compare(&reference, &found, false);
            assert_eq!(matches!(verdict, Verdict::NearTie(_)), near, "{verdict:?}");
        }
    }

    /// A token that is a space, and then one without, or one that begins with a space.
    #[test]
    fn a_text_may_have_left_the_reference_before_it_shows() {
        let mut reference = answer(&[(1, 1.0), (2, 0.1), (3, 1.0)]);
        reference.choices[0].tokens[1].chosen.text = " ".to_owned();
        reference.choices[0].text = " 1  3".to_owned();
        let mut found = without_tokens(answer(&[(1, 1.0)]));
        found.choices[0].text = " 1 102 9".to_owned();
        let verdict = compare(&reference, &found, false);
        assert!(matches!(verdict, Verdict::NearTie(_)), "{verdict:?}");
    }

    #[test]
    fn another_log_probability_end_or_number_of_choices_is_a_difference() {
        let reference = answer(&[(1, 1.0), (2, 1.0)]);
        let mut logprob = reference.clone();
        logprob.choices[0].tokens[0].chosen.logprob -= 1.1;
        let mut end = reference.clone();
        end.choices[0].finish_reason = "stop".to_owned();
        let mut choices = reference.clone();
        choices.choices.push(SoakChoice::default());
        let shorter = answer(&[(1, 1.0)]);
        for found in [
            logprob,
            end,
            choices,
            shorter.clone(),
            without_tokens(shorter),
        ] {
            let verdict = compare(&reference, &found, false);
            assert!(matches!(verdict, Verdict::Different(_)), "{verdict:?}");
        }
    }

    #[test]
    fn differences_are_counted_and_where_answers_are_exact_there_is_none() {
        let near = || Verdict::NearTie("x".to_owned());
        let mut exact = SoakTotals::default();
        exact.compared(Errand::Greedy, Verdict::Same(0.0)).unwrap();
        exact.judge_exact().unwrap();
        let mut rounded = exact.clone();
        rounded
            .compared(Errand::Greedy, Verdict::Same(0.125))
            .unwrap();
        rounded.judge_exact().unwrap_err();
        let mut totals = SoakTotals::default();
        totals.compared(Errand::Greedy, near()).unwrap();
        totals.add(exact);
        totals.judge_exact().unwrap_err();
        totals.add(rounded);
        let report = totals.to_string();
        assert!(
            report.contains("Greedy: 0 done, 4 compared, 1 near ties"),
            "{report}"
        );
        assert!(
            report.contains("0.1250") && report.ends_with("near tie: x"),
            "{report}"
        );
        totals
            .compared(Errand::Stop, Verdict::Different("y".to_owned()))
            .unwrap_err();
    }
}
