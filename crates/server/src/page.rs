//! The plain page at `/` that says what this server is and how to call it (D-32).
//!
//! Owns: the page. Refuses to know: everything that it does not show; it loads nothing from anywhere.

/// What the page shows.
pub(crate) struct Page<'a> {
    /// The host under which the reader came here.
    pub(crate) host: &'a str,
    /// `ready`, or why not.
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
            // Last, because it comes from the client: what it contains is not expanded again.
            .replace("{host}", &escape(self.host))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_32_the_page_names_models_and_never_trusts_a_host() {
        let models = [
            ("demo".into(), "ok".into()),
            ("<b>".into(), "loading".into()),
        ];
        let html = Page {
            host: "\"><script>{models}",
            state: "ready",
            models: &models,
        }
        .render();
        assert!(html.contains("<code>demo</code>") && html.contains("&lt;b&gt;"));
        assert!(html.contains("&quot;&gt;&lt;script&gt;{models}") && !html.contains("<script"));
        assert!(!html.contains("{version}") && !html.contains("src="));
    }
}
