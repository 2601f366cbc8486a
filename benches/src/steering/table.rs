//! A table in Markdown, ready for the page of figures.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::measure::Spread;

/// Rows under a heading. The same figures are kept for `--json`.
#[derive(Debug)]
pub struct Table {
    text: String,
    rows: Vec<Value>,
    title: String,
    columns: Vec<String>,
    passed: bool,
}

impl Table {
    /// A table with these columns.
    #[must_use]
    pub fn new(title: &str, columns: &[&str]) -> Self {
        let head = columns.join(" | ");
        let line = "---|".repeat(columns.len());
        Self {
            text: format!("## {title}\n\n| {head} |\n|{line}\n"),
            rows: Vec::new(),
            title: title.to_owned(),
            columns: columns.iter().map(|&column| column.to_owned()).collect(),
            passed: true,
        }
    }

    /// Adds a row, one cell for each column.
    pub fn row(&mut self, cells: &[String]) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "| {} |", cells.join(" | "));
        let members = self
            .columns
            .iter()
            .cloned()
            .zip(cells.iter().map(|cell| json!(cell)));
        self.rows.push(Value::Object(members.collect()));
    }

    /// The cell of a goal, which is met if `figure` is at most `goal`.
    pub fn at_most(&mut self, figure: f64, goal: f64) -> String {
        self.verdict(figure <= goal, &format!("at most {}", number(goal)))
    }

    /// The cell of a goal, which is met if `figure` is at least `goal`.
    pub fn at_least(&mut self, figure: f64, goal: f64) -> String {
        self.verdict(figure >= goal, &format!("at least {}", number(goal)))
    }

    fn verdict(&mut self, met: bool, goal: &str) -> String {
        self.passed &= met;
        let verdict = if met { "met" } else { "**missed**" };
        format!("{goal}: {verdict}")
    }

    /// Whether all goals are met.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.passed
    }

    /// The table as text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The rows as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"title": self.title, "rows": self.rows})
    }
}

/// A figure with as many digits as mean something.
#[must_use]
pub fn number(figure: f64) -> String {
    match figure.abs() {
        size if size >= 100.0 => format!("{figure:.0}"),
        size if size >= 10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.2}"),
    }
}

/// Minimum and median.
#[must_use]
pub fn pair(spread: Spread) -> String {
    format!("{} / {}", number(spread.min), number(spread.median))
}
