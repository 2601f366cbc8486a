//! Lists of hosts.
//!
//! Owns: what an entry may look like and which hosts it names. Refuses to know: addresses behind names.

use url::Host;

use super::error::BadConfig;

/// Hosts that may be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hosts(Vec<Entry>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    /// `*`
    Any,
    /// `*.example.com`, kept as `.example.com`: what is below it, not the name itself.
    Below(String),
    /// A name or an address.
    One(Host),
}

impl Hosts {
    /// Reads the entries under `key`.
    pub(super) fn read(key: &'static str, entries: &[String]) -> Result<Self, BadConfig> {
        let read = |entry: &String| {
            Entry::read(entry).ok_or_else(|| {
                let why = "write a host without scheme and port: example.com, *.example.com, 192.0.2.1, [2001:db8::1] or *";
                BadConfig::new(key, entry, why)
            })
        };
        entries.iter().map(read).collect::<Result<_, _>>().map(Self)
    }

    /// Whether a host stands in the list.
    pub(super) fn allow(&self, host: &Host<&str>) -> bool {
        self.0.iter().any(|entry| match (entry, host) {
            (Entry::Any, _) => true,
            (Entry::Below(suffix), Host::Domain(name)) => rooted(name).ends_with(suffix.as_str()),
            (Entry::One(Host::Domain(one)), Host::Domain(name)) => one == rooted(name),
            (Entry::One(Host::Ipv4(one)), Host::Ipv4(address)) => one == address,
            (Entry::One(Host::Ipv6(one)), Host::Ipv6(address)) => one == address,
            _ => false,
        })
    }

    /// Whether no host stands in it.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Entry {
    fn read(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Any);
        }
        let (below, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text),
        };
        match Host::parse(name).ok()? {
            Host::Domain(name) if name.contains('*') => None,
            Host::Domain(name) if below => Some(Self::Below(format!(".{}", rooted(&name)))),
            Host::Domain(name) => Some(Self::One(Host::Domain(rooted(&name).to_owned()))),
            _ if below => None,
            address => Some(Self::One(address)),
        }
    }
}

/// A name without the dot that ends a full one: both are the same host.
fn rooted(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(entries: &[&str]) -> Hosts {
        let entries: Vec<_> = entries.iter().map(ToString::to_string).collect();
        Hosts::read("hosts", &entries).unwrap()
    }

    #[test]
    fn ev_414_entries_name_hosts() {
        for (entry, yes, no) in [
            ("*", "a.b 192.0.2.1 [::1]", ""),
            (
                "example.com",
                "example.com EXAMPLE.com example.com.",
                "a.example.com example.com.evil.org",
            ),
            ("Example.COM.", "example.com", "example.org"),
            (
                "*.example.com",
                "a.example.com b.a.example.com a.example.com.",
                "example.com evilexample.com",
            ),
            (
                "192.0.2.1",
                "192.0.2.1 0xc0.0.2.1 3221225985",
                "192.0.2.2 a192.0.2.1.org",
            ),
            ("[2001:db8::1]", "[2001:db8:0::1]", "[2001:db8::2]"),
            ("bücher.example", "xn--bcher-kva.example", "bucher.example"),
        ] {
            let hosts = list(&[entry]);
            let allowed = |text: &str| {
                let url = url::Url::parse(&format!("https://{text}/")).unwrap();
                hosts.allow(&url.host().unwrap())
            };
            yes.split_whitespace()
                .for_each(|host| assert!(allowed(host), "{entry}: {host}"));
            no.split_whitespace()
                .for_each(|host| assert!(!allowed(host), "{entry}: {host}"));
        }
        assert!(!list(&[]).allow(&Host::Domain("example.com")));
    }

    #[test]
    fn ev_414_entries_that_name_no_host_are_refused() {
        for entry in [
            "",
            "https://example.com",
            "example.com:80",
            "a*.example.com",
            "*.192.0.2.1",
            "2001:db8::1",
            "a b",
        ] {
            let read = Hosts::read("hosts", &[entry.to_owned()]);
            let message = read.unwrap_err().to_string();
            assert!(
                message.contains("references.hosts") && message.contains(entry),
                "{message}"
            );
        }
    }

    proptest! {
        /// Only what an entry spells out is allowed, whatever the name around it.
        #[test]
        fn ev_414_no_name_is_taken_for_another(name in "[a-z.]{1,30}") {
            let hosts = list(&["example.com", "*.example.org"]);
            let name = name.trim_start_matches('.');
            let allowed = hosts.allow(&Host::Domain(name));
            let plain = name.strip_suffix('.').unwrap_or(name);
            prop_assert_eq!(allowed, plain == "example.com" || plain.ends_with(".example.org"));
        }
    }
}
