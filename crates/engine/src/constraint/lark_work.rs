//! What the terminals of a Lark grammar may cost the compiler, and the masks, without a limit of the library.
//!
//! Its fuel is counted after each derivative of a regular expression, and one derivative can be without bounds:
//!
//! - Of parts that may all be left out, each can be the next one. Their derivatives are lists of all that follow, so `n` such
//!   parts in a row cost `n²`.
//! - The derivative of an intersection has one member for each combination of the members of its operands: with `n` operators
//!   `&` and `w` members, `w` to the power of `n + 1`.
//! - Parametric rules have an item for each value of their parameter, and it has 64 bits.
//!
//! So these are counted in the text, and what is too much is refused. The counts are upper bounds, except that a group with a
//! count is no more than one part: the library repeats it without a copy.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::Chars;

use super::grammar::GrammarError;

/// Refuses a grammar of which one step of the compiler could be without bounds.
pub(super) fn check(lark: &str) -> Result<(), GrammarError> {
    let definitions = definitions(lark)?;
    let names: HashMap<&str, usize> = definitions
        .iter()
        .enumerate()
        .map(|(index, definition)| (definition.name, index))
        .collect();
    let mut works: Vec<Option<Work>> = vec![None; definitions.len()];
    let mut entered = vec![false; definitions.len()];
    for index in 0..definitions.len() {
        expand(&definitions, &names, index, &mut entered, &mut works);
    }
    for (definition, work) in definitions.iter().zip(works) {
        let mut checked = definition.literals.clone();
        checked.extend(work.filter(|_| is_terminal(definition.name)));
        for work in checked {
            work.check(definition.line)?;
        }
    }
    Ok(())
}

/// As [`check`], for a regular expression alone.
pub(super) fn check_regex(pattern: &str) -> Result<(), GrammarError> {
    Work::of_regex(pattern).check_alone("")
}

/// The members that a derivative of a regular expression may have.
pub(super) fn regex_width(pattern: &str) -> f64 {
    Work::of_regex(pattern).width
}

/// Whether an intersection of so many operands, whose widths add up to `width`, costs too much.
pub(super) fn are_too_many(width: f64, operands: usize) -> bool {
    let operands = i32::try_from(operands).unwrap_or(i32::MAX);
    operands > 1 && width.powi(operands) > COMBINATIONS_MAX
}

/// What an expression may cost. Numbers that are too large to count are infinite.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Work {
    /// Parts that may be left out.
    optional: f64,
    /// Operators `&` of one intersection.
    intersections: f64,
    /// Members of a derivative.
    width: f64,
    /// It has the flag `x`: `#` then begins a comment, in which this reader would see brackets that the library does not.
    ignores_spaces: bool,
}

impl Work {
    const NONE: Self = Self {
        optional: 0.0,
        intersections: 0.0,
        width: 1.0,
        ignores_spaces: false,
    };

    fn of_regex(pattern: &str) -> Self {
        let (mut optional, mut branches, mut unbounded) = (0.0, 0.0, false);
        let mut counts = 1.0;
        let mut characters = pattern.chars().peekable();
        let (mut in_class, mut ignores_spaces) = (false, false);
        let mut before = '(';
        while let Some(character) = characters.next() {
            match character {
                '\\' => drop(characters.next()),
                '[' => in_class = true,
                ']' => in_class = false,
                _ if in_class => {}
                // The alternatives of the group begin behind it.
                '?' if before == '(' => {
                    ignores_spaces |= read_flags(&mut characters).contains('x');
                    continue;
                }
                '?' | '*' | '+' => {
                    optional += f64::from(u8::from(character != '+'));
                    unbounded |= character != '?';
                    branches += 1.0;
                }
                // An empty alternative.
                '|' if matches!(before, '(' | '|') => {
                    optional += 1.0;
                    branches += 1.0;
                }
                ')' if matches!(before, '(' | '|') => optional += 1.0,
                '|' => branches += 1.0,
                '{' => {
                    let range: String =
                        std::iter::from_fn(|| characters.next_if(|&next| next != '}')).collect();
                    let (min, max) = range.split_once(',').unwrap_or((&range, &range));
                    let number = |text: &str| text.trim().parse::<f64>().ok();
                    optional += f64::from(u8::from(number(min).unwrap_or(0.0) == 0.0));
                    unbounded |= max.is_empty();
                    counts *= number(max).or_else(|| number(min)).unwrap_or(1.0).max(1.0);
                }
                _ => {}
            }
            before = character;
        }
        // Of a repetition several rounds can be open at once if something in it, or before it, has no fixed length.
        let rounds = if unbounded { counts } else { 1.0 };
        Self {
            optional,
            intersections: 0.0,
            width: (1.0 + branches) * rounds,
            ignores_spaces,
        }
    }

    /// A regular expression of Lark, as it is written: with slashes and flags.
    fn of_literal(literal: &str) -> Self {
        let pattern = literal.trim_start_matches('/');
        let (pattern, flags) = pattern.rsplit_once('/').unwrap_or((pattern, ""));
        let mut work = Self::of_regex(pattern);
        work.ignores_spaces |= flags.contains('x');
        work
    }

    fn check(self, line: usize) -> Result<(), GrammarError> {
        let at = format!("at line {line}, column 1: ");
        self.check_alone(&at)?;
        if self.intersections > 0.0 && self.width.powf(self.intersections + 1.0) > COMBINATIONS_MAX
        {
            return Err(GrammarError::new(format!(
                "{at}too many combinations of the operands of `&`: use fewer or simpler ones"
            )));
        }
        Ok(())
    }

    /// Checks what does not depend on other operands.
    fn check_alone(self, at: &str) -> Result<(), GrammarError> {
        if self.ignores_spaces {
            return Err(GrammarError::new(format!(
                "{at}the flag `x` of a pattern is not supported: write it without spaces and comments"
            )));
        }
        if self.optional > OPTIONAL_MAX {
            return Err(GrammarError::new(format!(
                "{at}a pattern may have {OPTIONAL_MAX} parts that can be left out"
            )));
        }
        Ok(())
    }
}

/// Reads what stands between `(?` and the text of the group. Returns the flags.
fn read_flags(characters: &mut Peekable<Chars<'_>>) -> String {
    let is_flag = |next: &char| next.is_ascii_alphabetic() || *next == '-';
    let flags = std::iter::from_fn(|| characters.next_if(is_flag)).collect();
    // A name may have brackets, which begin nothing.
    if characters.next_if_eq(&'<').is_some() {
        let _name_ends = characters.find(|&next| next == '>');
    }
    let _text_begins = characters.next_if_eq(&':');
    flags
}

/// Parts of an expression that may be left out: their square is within what one mask may cost.
const OPTIONAL_MAX: f64 = 2000.0;
/// Members of the derivative of an intersection.
const COMBINATIONS_MAX: f64 = 1e6;

/// A rule or a terminal.
struct Definition<'t> {
    name: &'t str,
    line: usize,
    /// Of its own text.
    own: Work,
    counts: f64,
    literals: Vec<Work>,
    references: Vec<&'t str>,
}

fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_')
        .starts_with(|first: char| first.is_ascii_uppercase())
}

/// Adds up what a definition and those that it refers to may cost, once for each reference.
fn expand(
    definitions: &[Definition<'_>],
    names: &HashMap<&str, usize>,
    root: usize,
    entered: &mut [bool],
    works: &mut [Option<Work>],
) {
    // With its own stack, because a chain of references may be as long as the text.
    let mut stack = vec![(root, false)];
    while let Some((index, leaves)) = stack.pop() {
        if works[index].is_some() {
            continue;
        }
        let definition = &definitions[index];
        let references = definition.references.iter().filter_map(|&name| {
            // Rules are no part of a regular expression.
            names.get(name).copied().filter(|_| is_terminal(name))
        });
        if !leaves {
            if entered[index] {
                continue;
            }
            entered[index] = true;
            stack.push((index, true));
            stack.extend(references.map(|reference| (reference, false)));
            continue;
        }
        // One without a result refers to this one, and the library refuses that.
        let parts = references.filter_map(|reference| works[reference]);
        let mut work = definition.own;
        let mut deepest = 0.0_f64;
        for part in parts.chain(definition.literals.iter().copied()) {
            work.optional += part.optional;
            work.width += part.width;
            // Intersections of intersections are one.
            if definition.own.intersections > 0.0 {
                work.intersections += part.intersections;
            }
            deepest = deepest.max(part.intersections);
        }
        work.intersections = work.intersections.max(deepest);
        work.width *= definition.counts;
        works[index] = Some(work);
    }
}

/// Splits a text into its definitions. What is no Lark is left to the compiler.
fn definitions(lark: &str) -> Result<Vec<Definition<'_>>, GrammarError> {
    let mut all = vec![Definition::new("", 1)];
    let (mut line, mut braces) = (1, 0_usize);
    let mut rest = lark;
    while let Some(first) = rest.chars().next() {
        let token = token(rest, first);
        let (token, after) = rest.split_at(token);
        rest = after;
        let begins_line = line;
        line += token.matches('\n').count();
        let Some(definition) = all.last_mut() else {
            break;
        };
        match first {
            '{' => {
                // Not within others: each scan begins behind the end of the one before, so all together are linear.
                let range = match braces {
                    0 => rest.split('}').next().filter(|range| is_range(range)),
                    _ => None,
                };
                if let Some(range) = range {
                    let numbers = range.split(',').map(|number| number.trim().parse().ok());
                    let most = numbers.clone().flatten().fold(1.0, f64::max);
                    let least: f64 = numbers.clone().next().flatten().unwrap_or(0.0);
                    definition.counts *= most;
                    definition.own.optional += f64::from(u8::from(least == 0.0));
                }
                braces += 1;
            }
            '}' => braces = braces.saturating_sub(1),
            // JSON, or the range of a repetition.
            _ if braces > 0 => {}
            ':' if token == "::" => {
                return Err(GrammarError::new(format!(
                    "at line {begins_line}, column 1: parametric rules are not supported"
                )));
            }
            ':' => {
                // The name was read as the last one of the definition before.
                let name = definition.references.pop().unwrap_or_default();
                all.push(Definition::new(name, begins_line));
            }
            '&' => definition.own.intersections += 1.0,
            '|' | '+' => definition.own.width += 1.0,
            '?' | '*' | '[' => {
                definition.own.width += 1.0;
                definition.own.optional += 1.0;
            }
            '/' if !token.starts_with("//") => {
                definition.literals.push(Work::of_literal(token));
            }
            _ if is_name(first) => definition.references.push(token),
            _ => {}
        }
    }
    Ok(all)
}

impl<'t> Definition<'t> {
    const fn new(name: &'t str, line: usize) -> Self {
        Self {
            name,
            line,
            own: Work::NONE,
            counts: 1.0,
            literals: Vec::new(),
            references: Vec::new(),
        }
    }
}

/// Whether it may stand between the braces of a repetition.
fn is_range(text: &str) -> bool {
    text.chars()
        .all(|character| character.is_ascii_digit() || ", ".contains(character))
}

const fn is_name(character: char) -> bool {
    character.is_ascii_alphabetic() || character == '_'
}

/// Bytes of the token at the beginning of `rest`, as the library reads it.
fn token(rest: &str, first: char) -> usize {
    let quoted = |quote: char| {
        let mut escaped = false;
        let end = rest[first.len_utf8()..].char_indices().find(|&(_, next)| {
            let ends = next == quote && !escaped;
            escaped = next == '\\' && !escaped;
            ends
        });
        end.map_or(rest.len(), |(at, _)| {
            first.len_utf8() + at + quote.len_utf8()
        })
    };
    let while_true = |holds: fn(char) -> bool| rest.find(|next| !holds(next)).unwrap_or(rest.len());
    match first {
        '"' => quoted('"'),
        '#' => while_true(|next| next != '\n'),
        '/' if rest.starts_with("//") => while_true(|next| next != '\n'),
        '/' => {
            let end = quoted('/');
            let flags = rest[end..].find(|next: char| !"imslux".contains(next));
            end + flags.unwrap_or(rest.len() - end)
        }
        // The name of a special token may have any characters but these. As the next `<` ends it, none is looked at twice.
        '<' => {
            let name = &rest[1..];
            let end = name.find(|next: char| "<>".contains(next) || next.is_whitespace());
            match end {
                Some(end) if name[end..].starts_with('>') => end + 2,
                _ => 1,
            }
        }
        ':' if rest.starts_with("::") => 2,
        _ if is_name(first) => {
            while_true(|next| is_name(next) || next.is_ascii_digit() || next == '-')
        }
        _ => first.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_is(lark: &str, expected: Result<(), &str>) {
        let result = check(lark).map_err(|error| error.to_string());
        match (&result, expected) {
            (Ok(()), Ok(())) => {}
            (Err(why), Err(expected)) if why.contains(expected) => {}
            _ => panic!("{lark}: {result:?}, not {expected:?}"),
        }
    }

    #[test]
    fn ai_841_usual_grammars_are_not_refused() {
        for lark in [
            "start: A\nA: /[a-z]+/ & ~/if|else|while|for/",
            "start: word+\nword: A | \"::\" | \"a & b & c & d\" /&&&&&&/ // & & & &\nA: /(a|b)*&(a|b)*&/",
            "start: A B\nA: /(?s:.{1000})/ & /[^a]*/ & ~/b/\nB: %regex {\"substring_chars\": \"a?b?&::&\"}",
            "start: <|a&b::|> %json {\"type\": \"string\", \"pattern\": \"a & b :: c\"}",
            "%llguidance {\"no_forcing\": true}\nstart[max_tokens=5]: A*\nA.2: \"x\"? \"y\" # a: & ::",
        ] {
            check_is(lark, Ok(()));
        }
        let words: Vec<String> = (0..20_000).map(|word| word.to_string()).collect();
        check_is(&format!("start: /{}/", words.join("|")), Ok(()));
        assert!(check_regex(&words.join("|")).is_ok());
    }

    #[test]
    fn ai_841_parts_that_may_be_left_out_are_counted() {
        let max = OPTIONAL_MAX as usize;
        for part in ["a?", "(?:a|)", "(|a)", "a*", "a{0,2}", "(b?)"] {
            assert!(check_regex(&part.repeat(max)).is_ok(), "{part}");
            assert!(check_regex(&part.repeat(max + 1)).is_err(), "{part}");
        }
        // None of these is one.
        assert!(check_regex(&r"\?[?*](?:a+)(?s:b){2}".repeat(max + 1)).is_ok());
        let why = "parts that can be left out";
        check_is(&format!("start: A\nA: {}", "\"a\"? ".repeat(max)), Ok(()));
        check_is(
            &format!("start: A\nA: {}", "\"a\"? ".repeat(max + 1)),
            Err(why),
        );
        // Eleven times two of them.
        let doubled = |levels: usize| -> String {
            let level = |level| format!("A{level}: A{} A{}\n", level + 1, level + 1);
            (0..levels).map(level).collect::<String>() + &format!("A{levels}: \"a\"?\n")
        };
        check_is(&format!("start: A0\n{}", doubled(10)), Ok(()));
        check_is(&format!("start: A0\n{}", doubled(11)), Err(why));
        check_is(&format!("start: A0\n{}", doubled(1500)), Err(why));
        // Rules are another matter: the library has a limit of their items.
        check_is(
            &format!("start: a\na: {}", "\"a\"? ".repeat(max + 1)),
            Ok(()),
        );
    }

    /// Other readers of the pattern, as the library, would see more parts than this one.
    #[test]
    fn ai_841_no_part_of_a_pattern_is_hidden() {
        let parts = "a?".repeat(OPTIONAL_MAX as usize + 1);
        let why = "the flag `x` of a pattern is not supported";
        for pattern in [
            format!("(?x)# [\n{parts}"),
            format!("(?ix:# [\n{parts})"),
            format!("(?i-x:# [\n{parts})"),
        ] {
            let error = check_regex(&pattern).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        check_is(&format!("start: /# [\n{parts}/x"), Err(why));
        check_is("start: a /b/imslux", Err(why));
        check_is("start: a\nA: B /b(?sx)c/", Err(why));
        check_is("start: /(?P<x>x\\(?x)/i", Ok(()));
        let why = "parts that can be left out";
        for pattern in [
            format!("(?P<a[>b){parts}"),
            format!("(?<a[>b){parts}"),
            "(?:|a)".repeat(OPTIONAL_MAX as usize + 1),
            "(a|())".repeat(OPTIONAL_MAX as usize + 1),
        ] {
            let error = check_regex(&pattern).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    /// Each took minutes, on the thread of the caller.
    #[test]
    fn ai_841_the_check_is_linear() {
        let bytes = 256 << 10;
        for part in [
            "<", "{", "<a", "{\"", "{}<", "(?<", "a{", "/", "\"a", "[", ":",
        ] {
            let begun = std::time::Instant::now();
            let text = part.repeat(bytes / part.len());
            let _checked = (check(&text), check_regex(&text));
            let took = begun.elapsed();
            assert!(took.as_secs() < 5, "{part} took {took:?}");
        }
    }

    #[test]
    fn ai_841_intersections_are_counted() {
        let why = "operands of `&`";
        let operands = |count: usize| vec!["/(.*)a(.*)/"; count].join(" & ");
        check_is(&format!("start: A\nA: {}", operands(3)), Ok(()));
        check_is(&format!("start: A\nA: {}", operands(8)), Err(why));
        // However they are written.
        let chain: String = (0..8)
            .map(|index| format!("A{index}: A{} & /(.*)a(.*)/ ", index + 1))
            .collect();
        check_is(&format!("start: A0\n{chain} A8: /b/"), Err(why));
        // Those of alternatives are not combined.
        let each: String = (0..100)
            .map(|index| format!("A{index}: /a+/ & /[ab]+/\n"))
            .collect();
        let all: Vec<String> = (0..100).map(|index| format!("A{index}")).collect();
        check_is(&format!("start: {}\n{each}", all.join(" | ")), Ok(()));
        check_is("start: A\nA: /(.*a){2000}/ & /(.*b){2000}/", Err(why));
    }

    #[test]
    fn ai_841_parametric_rules_are_refused() {
        check_is(
            "start: p::0\np::_: /a/ p::set_bit(1) %if bit_clear(1) | \"\"",
            Err("at line 1, column 1: parametric"),
        );
    }

    #[test]
    fn what_is_no_grammar_is_left_to_the_compiler() {
        for lark in [
            "",
            ":",
            "\"",
            "/",
            "<",
            "{",
            "}}",
            "a: \"\\",
            "é:é",
            "a: A\nA: A A & A",
            "::",
        ] {
            let _checked = check(lark);
        }
    }
}
