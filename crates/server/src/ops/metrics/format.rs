//! The text formats of Prometheus 0.0.4 and OpenMetrics 1.0 (OA-801).

use std::fmt::{Display, Write};

use prometheus::core::Metric;
use prometheus::proto::{MetricFamily, MetricType};
use sapwood_engine::stats::Histogram;

/// The text format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The text format 0.0.4, unless the scraper asks for the other one.
    #[default]
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The format that an `Accept` header prefers.
    #[must_use]
    pub fn of(accept: Option<&str>) -> Self {
        let quality = |kind: &str| {
            let asked = accept.unwrap_or_default().split(',');
            let named = asked.filter(|one| {
                one.split(';')
                    .next()
                    .is_some_and(|name| name.trim() == kind)
            });
            named.map(quality).fold(0.0, f32::max)
        };
        let open = quality("application/openmetrics-text");
        // `*/*` does not count: whoever takes anything gets the older format, which every scraper reads.
        if open > 0.0 && open >= quality("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// The media type of the response.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The `q` of one element of an `Accept` header.
fn quality(element: &str) -> f32 {
    let mut parameters = element.split(';').skip(1);
    let q = parameters.find_map(|parameter| parameter.trim().strip_prefix("q="));
    // A malformed weight counts as a refusal, so that the default format is used.
    q.map_or(1.0, |q| q.trim().parse().unwrap_or(0.0))
}

/// Writer for the text, family by family.
#[derive(Debug, Default)]
pub(super) struct MetricsText {
    written: String,
    format: Format,
}

/// Labels of one sample.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

impl MetricsText {
    pub(super) fn new(format: Format) -> Self {
        Self {
            written: String::new(),
            format,
        }
    }

    /// Begins a family; its samples follow.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let name = match (self.format, kind) {
            // In OpenMetrics the name of a counter's family lacks the suffix that its samples have.
            (Format::OpenMetrics, "counter") => name.strip_suffix("_total").unwrap_or(name),
            _ => name,
        };
        // Writing into a `String` cannot fail, here and below.
        let _ = writeln!(self.written, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One number.
    pub(super) fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl Display) {
        let _ = writeln!(self.written, "{name}{} {value}", braces(labels, None));
    }

    /// A gauge without labels.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, &[], value);
    }

    /// A counter without labels.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.sample(name, &[], value);
    }

    /// One histogram that is not an engine's.
    pub(super) fn observed(
        &mut self,
        name: &str,
        labels: Labels<'_>,
        histogram: &prometheus::Histogram,
    ) {
        let metric = histogram.metric();
        let observed = metric.get_histogram();
        let buckets = observed.get_bucket().iter();
        let buckets = buckets.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
        // The crate leaves the infinite bucket to whoever renders.
        let last = (f64::INFINITY, observed.get_sample_count());
        self.buckets(
            name,
            labels,
            buckets.chain([last]),
            observed.get_sample_sum(),
        );
    }

    /// One histogram of an engine.
    pub(super) fn histogram(&mut self, name: &str, labels: Labels<'_>, histogram: &Histogram) {
        let bounds = histogram.bounds().iter().copied();
        // Engines count each bucket by itself; the text has cumulative counts.
        let counts = histogram.counts().scan(0, |total, count| {
            *total += count;
            Some(*total)
        });
        let buckets = bounds.chain([f64::INFINITY]).zip(counts);
        self.buckets(name, labels, buckets, histogram.sum());
    }

    /// One histogram: pairs of an upper bound, the last of which is infinite, and the cumulative count; and the sum of all
    /// observations.
    fn buckets(
        &mut self,
        name: &str,
        labels: Labels<'_>,
        buckets: impl Iterator<Item = (f64, u64)>,
        sum: f64,
    ) {
        let mut all = 0;
        for (bound, total) in buckets {
            // `{:?}` writes whole numbers with a decimal point, as OpenMetrics requires for bounds.
            let bound = if bound.is_finite() {
                format!("{bound:?}")
            } else {
                "+Inf".into()
            };
            let braces = braces(labels, Some(&bound));
            let _ = writeln!(self.written, "{name}_bucket{braces} {total}");
            // The count is that of the last bucket and not another read of the counters, which run on meanwhile: the two must
            // be equal.
            all = total;
        }
        let braces = braces(labels, None);
        let _ = writeln!(self.written, "{name}_sum{braces} {sum}");
        let _ = writeln!(self.written, "{name}_count{braces} {all}");
    }

    /// The families of a registry, which has counters and gauges only.
    pub(super) fn gathered(&mut self, families: &[MetricFamily]) {
        for family in families {
            let counts = family.get_field_type() == MetricType::COUNTER;
            let kind = if counts { "counter" } else { "gauge" };
            self.family(family.name(), kind, family.help());
            for metric in family.get_metric() {
                let labels = metric.get_label().iter();
                let labels: Vec<_> = labels.map(|label| (label.name(), label.value())).collect();
                let value = if counts {
                    metric.get_counter().get_value()
                } else {
                    metric.get_gauge().get_value()
                };
                self.sample(family.name(), &labels, value);
            }
        }
    }

    /// The finished text.
    pub(super) fn end(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.written += "# EOF\n";
        }
        self.written
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
    fn label_values_are_escaped() {
        let mut text = MetricsText::default();
        text.sample("x", &[("model", "a\"b\\c\nd")], 1);
        text.sample("y", &[], 2.5);
        assert_eq!(text.end(), "x{model=\"a\\\"b\\\\c\\nd\"} 1\ny 2.5\n");
    }

    #[test]
    fn oa_801_a_scraper_gets_the_format_that_it_prefers() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        for (accept, open) in [
            (None, false),
            (Some("*/*"), false),
            (Some("text/plain"), false),
            (Some("application/openmetrics-text"), true),
            (Some("application/openmetrics-text; version=1.0.0"), true),
            (Some(prometheus), true),
            (
                Some("text/plain, application/openmetrics-text;q=0.9"),
                false,
            ),
            (Some("application/openmetrics-text;q=0"), false),
            (Some("application/openmetrics-text;q=much"), false),
        ] {
            let format = if open {
                Format::OpenMetrics
            } else {
                Format::Text
            };
            assert_eq!(Format::of(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn oa_801_open_metrics_has_counters_without_suffix_and_an_eof() {
        let write = |format| {
            let mut text = MetricsText::new(format);
            text.family("x_total", "counter", "All.");
            text.sample("x_total", &[], 1);
            text.end()
        };
        assert_eq!(
            write(Format::Text),
            "# HELP x_total All.\n# TYPE x_total counter\nx_total 1\n"
        );
        let open = "# HELP x All.\n# TYPE x counter\nx_total 1\n# EOF\n";
        assert_eq!(write(Format::OpenMetrics), open);
    }
}
