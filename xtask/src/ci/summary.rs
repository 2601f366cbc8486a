//! The result of each lane, and of the run as a whole.

use std::time::Duration;

use anyhow::{Result, bail};

use super::Outcome;
use crate::process;

/// The result of one lane.
pub(super) struct Report {
    pub(super) lane: &'static str,
    pub(super) took: Duration,
    pub(super) result: Result<Outcome>,
}

/// The results of all lanes.
#[derive(Default)]
pub(super) struct Summary(Vec<Report>);

impl Summary {
    pub(super) fn add(&mut self, report: Report) {
        self.0.push(report);
    }

    /// Prints a line for each lane, and the failed ones last.
    ///
    /// # Errors
    /// A lane failed, or one was skipped that is not in `allowed`.
    pub(super) fn conclude(&self, allowed: impl Fn(&str) -> bool) -> Result<()> {
        process::heading("summary");
        for report in &self.0 {
            process::print_line(&line(report));
        }
        let total: Duration = self.0.iter().map(|report| report.took).sum();
        let skipped = self.names(|result| matches!(result, Ok(Outcome::Skipped(_))));
        let failed = self.names(Result::is_err);
        process::print_line(&format!(
            "lanes: {} passed, {} failed, {} skipped, in {} min {} s",
            self.0.len() - failed.len() - skipped.len(),
            failed.len(),
            skipped.len(),
            total.as_secs() / 60,
            total.as_secs() % 60
        ));
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        let forbidden: Vec<_> = skipped.into_iter().filter(|lane| !allowed(lane)).collect();
        if !forbidden.is_empty() {
            let lanes = forbidden.join(",");
            bail!("skipped: {lanes}; install what is missing, or say `--allow-skips {lanes}`");
        }
        Ok(())
    }

    fn names(&self, ended: impl Fn(&Result<Outcome>) -> bool) -> Vec<&'static str> {
        let reports = self.0.iter().filter(|report| ended(&report.result));
        reports.map(|report| report.lane).collect()
    }
}

fn line(report: &Report) -> String {
    let word = match &report.result {
        Ok(Outcome::Passed) => "ok".to_owned(),
        Ok(Outcome::Skipped(why)) => format!("SKIPPED: {why}"),
        Err(error) => format!("FAILED: {error:#}"),
    };
    format!("{:10} {:>5} s  {word}", report.lane, report.took.as_secs())
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn concluded(results: Vec<Result<Outcome>>, allowed: &[&str]) -> Result<()> {
        let mut summary = Summary::default();
        for (lane, result) in ["a", "b", "c"].into_iter().zip(results) {
            let took = Duration::from_secs(1);
            summary.add(Report { lane, took, result });
        }
        summary.conclude(|lane| allowed.contains(&lane))
    }

    #[test]
    fn a_skipped_lane_fails_the_run_unless_it_is_allowed() {
        let skipped = || Ok(Outcome::Skipped("no tool".to_owned()));
        let reported =
            |results, allowed: &[&str]| concluded(results, allowed).err().map(|e| e.to_string());
        assert_eq!(reported(vec![Ok(Outcome::Passed)], &[]), None);
        let one = "skipped: b; install what is missing, or say `--allow-skips b`".to_owned();
        assert_eq!(
            reported(vec![Ok(Outcome::Passed), skipped()], &[]),
            Some(one.clone())
        );
        assert_eq!(reported(vec![skipped(), skipped()], &["a"]), Some(one));
        assert_eq!(reported(vec![skipped(), skipped()], &["a", "b"]), None);
        let failed = reported(
            vec![Err(anyhow!("why")), skipped(), Err(anyhow!("why"))],
            &["a"],
        );
        assert_eq!(failed.as_deref(), Some("failed: a, c"));
    }
}
