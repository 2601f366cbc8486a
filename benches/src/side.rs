//! One of two servers that a bench compares: ours or llama.cpp's, and the form of its requests.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::child::{Server, free_address};

/// A running server, and the form of its requests.
#[derive(Debug)]
pub struct Side {
    /// The name of its program.
    pub name: &'static str,
    /// Its process.
    pub server: Server,
    /// The path of a request whose response is an event stream.
    pub path: &'static str,
    /// The members of a request for a number of tokens that continues a prompt, without those for sampling.
    pub body: fn(&str, u32) -> Value,
}

impl Side {
    /// Starts `sapwood serve` with a model, further arguments, and variables of its environment. Its port is free now; if
    /// another process takes it in between, the server ends, and so does the bench.
    ///
    /// # Errors
    /// As [`Server::spawn_at`].
    pub async fn sapwood(
        program: &Path,
        model: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let address = free_address()?;
        let mut command = Command::new(program);
        command.args(["serve", "--listen", &address.to_string()]);
        // `NAME=PATH`, so that the path of a request does not depend on the file.
        let named = format!("bench={}", model.display());
        command.args(["--model", &named]).args(arguments);
        command.envs(environment.iter().copied());
        Ok(Self {
            name: "sapwood",
            server: Server::spawn_at(&mut command, address, "/readyz").await?,
            path: "/v2/models/bench/generate_stream",
            body: |prompt, tokens| json!({"text_input": prompt, "stream": true, "max_tokens": tokens, "min_tokens": tokens}),
        })
    }

    /// Starts llama.cpp's server with a model and further arguments.
    ///
    /// # Errors
    /// As [`Server::spawn_at`].
    pub async fn llama_server(program: &Path, model: &Path, arguments: &[String]) -> Result<Self> {
        Ok(Self {
            name: "llama-server",
            server: Server::llama_server(program, model, arguments).await?,
            path: "/completion",
            body: |prompt, tokens| json!({"prompt": prompt, "stream": true, "n_predict": tokens, "ignore_eos": true}),
        })
    }
}

/// A prompt that shares no more than its first words with any other.
#[must_use]
pub fn prompt(number: usize, words: usize) -> String {
    let words = (1..words).map(|at| WORDS[(number + at * at) % WORDS.len()]);
    words.fold(format!("Chapter {number}."), |text, word| text + " " + word)
}

/// The data of the server-sent events of a response, each of which is JSON.
pub fn events(reply: &str) -> impl Iterator<Item = Value> {
    let events = reply.lines().filter_map(|line| line.strip_prefix("data: "));
    events.filter_map(|event| serde_json::from_str(event).ok())
}

/// The text of an answer in server-sent events of either server.
#[must_use]
pub fn text(reply: &[u8]) -> String {
    let pieces = events(&String::from_utf8_lossy(reply))
        .filter_map(|event| {
            let piece = event.get("text_output").or_else(|| event.get("content"))?;
            piece.as_str().map(str::to_owned)
        })
        .collect::<Vec<_>>();
    pieces.concat()
}

/// The sum of a metric over its labels, in the text format of Prometheus.
///
/// # Errors
/// If the server does not have it.
pub fn metric(scrape: &str, name: &str) -> Result<f64> {
    let values = scrape.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = rest
            .starts_with([' ', '{'])
            .then(|| rest.rsplit(' ').next())??;
        value.parse::<f64>().ok()
    });
    let sum = values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value));
    sum.with_context(|| format!("the server does not count {name}"))
}

const WORDS: &[&str] = &[
    "the", "river", "was", "slow", "and", "nobody", "came", "to", "see", "why", "a", "boat", "had",
    "stopped", "under", "old", "trees", "where", "children", "used", "play", "in", "summer",
    "before", "mill", "closed", "its", "doors", "for", "good", "then", "one", "morning", "letter",
    "arrived", "from", "town", "that", "everyone", "believed", "lost", "asking", "how", "many",
    "houses", "still", "stood", "along", "bank", "who", "lived", "them", "what", "they", "needed",
    "most", "of", "all", "this", "year", "again",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_not_over_longer_names() {
        let scrape = "# TYPE a gauge\na{m=\"x y\"} 1\na{m=\"z\"} 2.5\na_total 7\nb 3\n";
        assert!((metric(scrape, "a").unwrap() - 3.5).abs() < f64::EPSILON);
        assert!((metric(scrape, "b").unwrap() - 3.0).abs() < f64::EPSILON);
        assert!(metric(scrape, "c").is_err());
    }

    #[test]
    fn the_text_of_either_servers_events_is_joined() {
        let ours = b"HTTP/1.1 200 OK\r\n\r\ndata: {\"text_output\":\"a\"}\n\ndata: {\"text_output\":\" b\"}\n\n";
        assert_eq!(text(ours), "a b");
        let theirs = b"data: {\"content\":\"a\"}\n\ndata: {\"content\":\"\",\"timings\":{}}\n\ndata: [DONE]\n\n";
        assert_eq!(text(theirs), "a");
    }
}
