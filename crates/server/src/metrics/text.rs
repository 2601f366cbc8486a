//! The text format 0.0.4, for numbers that live elsewhere and are only read here.
//!
//! Owns: the format. Refuses to know: which numbers there are.

use std::fmt::{Display, Write};

use sapwood_engine::stats::Histogram;

/// A text that grows family by family.
#[derive(Debug, Default)]
pub(super) struct Text(pub(super) String);

/// Labels of one sample.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

impl Text {
    /// Begins a family; its samples follow.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a string cannot fail, here and below.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One number.
    pub(super) fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl Display) {
        let _ = writeln!(self.0, "{name}{} {value}", braces(labels, None));
    }

    /// One histogram.
    pub(super) fn histogram(&mut self, name: &str, labels: Labels<'_>, histogram: &Histogram) {
        let bounds = histogram.bounds().iter().map(ToString::to_string);
        let mut total = 0;
        for (bound, count) in bounds.chain(["+Inf".into()]).zip(histogram.counts()) {
            total += count;
            let _ = writeln!(
                self.0,
                "{name}_bucket{} {total}",
                braces(labels, Some(&bound))
            );
        }
        let _ = writeln!(
            self.0,
            "{name}_sum{} {}",
            braces(labels, None),
            histogram.sum()
        );
        let _ = writeln!(self.0, "{name}_count{} {total}", braces(labels, None));
    }
}

fn braces(labels: Labels<'_>, bound: Option<&str>) -> String {
    let labels = labels
        .iter()
        .copied()
        .chain(bound.map(|bound| ("le", bound)));
    let inner: Vec<_> = labels
        .map(|(name, value)| format!("{name}=\"{}\"", escape(value)))
        .collect();
    if inner.is_empty() {
        String::new()
    } else {
        format!("{{{}}}", inner.join(","))
    }
}

fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_cannot_break_out() {
        let mut text = Text::default();
        text.sample("x", &[("model", "a\"b\\c\nd")], 1);
        text.sample("y", &[], 2.5);
        assert_eq!(text.0, "x{model=\"a\\\"b\\\\c\\nd\"} 1\ny 2.5\n");
    }
}
