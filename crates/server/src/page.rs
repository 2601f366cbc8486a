//! The plain page at `/` that shows what this server is and how to call it (D-32). It loads no other resources.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// The content of the page.
pub(crate) struct Page<'a> {
    /// The host of the request.
    pub(crate) host: &'a str,
    /// The scheme of the request, `http` or `https`.
    pub(crate) scheme: &'a str,
    /// Whether callers must present a key.
    pub(crate) key: bool,
    /// `ready`, or the reason why not.
    pub(crate) state: &'a str,
    /// Name and state of every model.
    pub(crate) models: &'a [(String, String)],
}

impl Page<'_> {
    /// The page as HTML.
    pub(crate) fn render(&self) -> String {
        TEMPLATE
            .replace("{version}", &escape(crate::VERSION))
            .replace("{state}", &escape(self.state))
            .replace("{models}", &self.table())
            .replace("{key}", if self.key { KEY } else { NO_KEY })
            .replace("{header}", if self.key { HEADER } else { "" })
            .replace("{option}", if self.key { OPTION } else { "" })
            .replace("{docs}", DOCS)
            .replace("{scheme}", &escape(self.scheme))
            .replace("{model}", &escape(&self.example()))
            // Last, because it comes from the client: placeholders in it are not replaced.
            .replace("{host}", &escape(self.host))
    }

    /// The name of the first model, encoded for a path.
    fn example(&self) -> String {
        let name = self.models.first().map_or("MODEL", |(name, _)| name);
        // Everything but letters and digits, because the example is a path within a shell command within HTML.
        utf8_percent_encode(name, NON_ALPHANUMERIC).to_string()
    }

    fn table(&self) -> String {
        if self.models.is_empty() {
            return "<p>None.</p>".into();
        }
        let row = |(name, state): &(String, String)| {
            format!(
                "<tr><td><code>{}</code></td><td>{}</td></tr>\n",
                escape(name),
                escape(state)
            )
        };
        format!(
            "<table>\n{}</table>",
            self.models.iter().map(row).collect::<String>()
        )
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

const TEMPLATE: &str = include_str!("page.html");
const KEY: &str = "Every call needs a key: <code>authorization: Bearer KEY</code>.";
const NO_KEY: &str = "No key is needed.";
const HEADER: &str = " \\\n  -H &quot;authorization: Bearer $SAPWOOD_CLIENT_KEY&quot;";
const OPTION: &str = " --api-key KEY";
const DOCS: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_32_the_page_lists_models_and_escapes_the_host() {
        let models = [
            ("demo".into(), "ok".into()),
            ("<b>".into(), "loading".into()),
        ];
        let html = Page {
            host: "\"><script>{models}",
            scheme: "http",
            key: false,
            state: "ready",
            models: &models,
        }
        .render();
        assert!(html.contains("<code>demo</code>") && html.contains("&lt;b&gt;"));
        assert!(html.contains("&quot;&gt;&lt;script&gt;{models}") && !html.contains("<script"));
        assert!(!html.contains("{version}") && !html.contains("src="));
    }

    #[test]
    fn d_32_the_page_shows_how_to_call_a_model_and_whether_a_key_is_needed() {
        let models = [("org/a b".into(), "upstream".into())];
        for (key, scheme) in [(true, "https"), (false, "http")] {
            let html = Page {
                host: "h:1",
                scheme,
                key,
                state: "ready",
                models: &models,
            }
            .render();
            let curl = format!("curl -s {scheme}://h:1/v2/models/org%2Fa%20b/generate");
            assert!(html.contains(&curl), "{html}");
            assert_eq!(html.contains("needs a key"), key, "{html}");
            assert_eq!(html.contains("Bearer $SAPWOOD_CLIENT_KEY"), key, "{html}");
            assert!(html.contains("/blob/main/docs/cli.md\""), "{html}");
            assert!(!html.contains('{') || !html.contains("{docs}"), "{html}");
        }
    }
}
