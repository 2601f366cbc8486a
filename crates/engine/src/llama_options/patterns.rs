//! Which regular expressions llama.cpp gets for names of tensors. It matches them with `std::regex`, which tries all ways in
//! which a pattern may match one after the other, and recurses for each group and each character.

/// Checks a pattern: literal text, `.`, classes, groups, alternatives, and repetitions of single characters, as far as they
/// cannot match a name in too many ways.
///
/// # Errors
/// What it must not have.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    if pattern.len() > BYTES_MAX {
        return Err(format!("a pattern has at most {BYTES_MAX} bytes"));
    }
    let mut scan = PatternScan {
        rest: pattern.chars().peekable(),
        ways: 1,
    };
    scan.alternatives(0)?;
    match scan.rest.next() {
        None => Ok(()),
        Some(_) => Err("a closing bracket without an opening one".to_owned()),
    }
}

const BYTES_MAX: usize = 256;
const GROUPS_MAX: u32 = 8;
/// The maximum of ways in which a pattern may match: three unbounded repetitions, and a few alternatives.
const WAYS_MAX: u64 = 1 << 20;
/// One more than the bytes of the longest name of a tensor.
const REPEATED: u64 = 65;

struct PatternScan<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    /// An upper bound, because every choice multiplies it.
    ways: u64,
}

impl PatternScan<'_> {
    /// Scans up to the end of a group, or of the pattern.
    fn alternatives(&mut self, depth: u32) -> Result<(), String> {
        if depth > GROUPS_MAX {
            return Err(format!("groups nest at most {GROUPS_MAX} deep"));
        }
        let mut alternatives = 1;
        while let Some(&next) = self.rest.peek() {
            match next {
                ')' => break,
                '|' => {
                    self.rest.next();
                    alternatives += 1;
                }
                _ => self.atom(depth)?,
            }
        }
        self.choose(alternatives)
    }

    /// Scans a character, a class or a group, and how often it is repeated.
    fn atom(&mut self, depth: u32) -> Result<(), String> {
        let is_group = match self.rest.next() {
            Some('(') => {
                self.group(depth)?;
                true
            }
            Some('[') => {
                self.class()?;
                false
            }
            Some('\\') => {
                self.escape()?;
                false
            }
            Some('*' | '+' | '?' | '{' | '}' | ']') => {
                return Err(
                    "a repetition or a bracket that belongs to nothing; a backslash makes it text"
                        .to_owned(),
                );
            }
            _ => false,
        };
        self.repetition(is_group)
    }

    fn group(&mut self, depth: u32) -> Result<(), String> {
        if self.rest.next_if_eq(&'?').is_some() && self.rest.next() != Some(':') {
            return Err("of groups that begin with (? only (?: is supported".to_owned());
        }
        self.alternatives(depth + 1)?;
        match self.rest.next() {
            Some(')') => Ok(()),
            _ => Err("a group is not closed".to_owned()),
        }
    }

    fn class(&mut self) -> Result<(), String> {
        self.rest.next_if_eq(&'^');
        // An empty class and one that begins with a bracket differ from library to library.
        let mut is_empty = true;
        loop {
            match self.rest.next() {
                Some(']') if !is_empty => return Ok(()),
                Some('\\') => self.escape()?,
                None | Some('[' | ']') => {
                    return Err("a class is empty, not closed, or has another within".to_owned());
                }
                Some(_) => {}
            }
            is_empty = false;
        }
    }

    fn escape(&mut self) -> Result<(), String> {
        match self.rest.next() {
            Some('d' | 'D' | 'w' | 'W' | 's' | 'S') => Ok(()),
            Some(escaped) if escaped.is_ascii_punctuation() => Ok(()),
            _ => Err("of escapes there are \\d, \\w, \\s and those of punctuation".to_owned()),
        }
    }

    fn repetition(&mut self, is_group: bool) -> Result<(), String> {
        let ways = match self.rest.peek() {
            Some('?') => 2,
            Some('*' | '+' | '{') => REPEATED,
            _ => return Ok(()),
        };
        if is_group && ways > 2 {
            return Err("a group cannot be repeated".to_owned());
        }
        if self.rest.next() == Some('{') {
            let mut inside = String::new();
            while let Some(next) = self.rest.next_if(|&next| next != '}') {
                inside.push(next);
            }
            let parts: Vec<&str> = inside.split(',').collect();
            let is_count = |part: &&str| {
                (1..=2).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
            };
            let is_closed = self.rest.next().is_some();
            if !is_closed || parts.len() > 2 || !parts.iter().all(is_count) {
                return Err("a repetition in braces is {N} or {N,N}, up to 99".to_owned());
            }
        }
        if matches!(self.rest.peek(), Some('*' | '+' | '?' | '{')) {
            return Err("a repetition cannot be repeated".to_owned());
        }
        self.choose(ways)
    }

    fn choose(&mut self, ways: u64) -> Result<(), String> {
        self.ways = self.ways.saturating_mul(ways);
        if self.ways > WAYS_MAX {
            return Err(
                "it has too many repetitions and alternatives: use several entries".to_owned(),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_that_people_write_pass() {
        for pattern in [
            "exps",
            "ffn_.*_exps",
            r"blk\.(?:[0-9]|[1-3][0-9])\.ffn_(up|down|gate)_exps\.weight",
            r"^blk\.\d+\.attn_.*\.weight$",
            r"blk\.[0-9]{1,2}\.ffn_(up|gate)?_?exps",
            "a=b",
            ".*",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn patterns_that_take_for_ever_are_refused() {
        let deep = format!("{}a{}", "(".repeat(100), ")".repeat(100));
        let long = "a".repeat(257);
        for (pattern, part) in [
            ("(a*)*", "group cannot be repeated"),
            ("(a|a)+b", "group cannot be repeated"),
            ("(a){50}", "group cannot be repeated"),
            ("a**", "repetition cannot be repeated"),
            (".*.*.*.*x", "too many"),
            (&"(a|a)".repeat(21), "too many"),
            (&"a?".repeat(21), "too many"),
            ("[](a|a)*]", "class"),
            ("[a[b](a|a)*]", "class"),
            ("[a", "class"),
            (r"(a)\1", "escapes"),
            ("(?=a)", "(?:"),
            ("(a", "not closed"),
            ("a)", "closing"),
            ("*", "belongs to nothing"),
            ("a{100000}", "up to 99"),
            ("a{1", "{N}"),
            (&deep, "nest"),
            (&long, "256 bytes"),
        ] {
            let refused = check(pattern).unwrap_err();
            assert!(refused.contains(part), "{pattern}: {refused}");
        }
    }
}
