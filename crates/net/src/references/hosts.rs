//! Allow lists of hosts.

use url::{Host, Url};

use super::error::BadConfig;

/// A list of allowed hosts, with their ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hosts(Vec<HostRule>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct HostRule {
    names: Names,
    port: AllowedPort,
}

/// Which ports of a host are allowed: listing its name does not allow other services on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllowedPort {
    /// The default port of the scheme.
    Usual,
    One(u16),
    /// `:*`
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Names {
    /// `*`
    Any,
    /// `*.example.com`, stored as `.example.com`: subdomains, not the name itself.
    Below(String),
    /// A name or an address.
    One(Host),
}

impl Hosts {
    /// Parses the entries of the list `key`.
    pub(super) fn read(key: &'static str, entries: &[String]) -> Result<Self, BadConfig> {
        let read = |entry: &String| {
            HostRule::read(entry).ok_or_else(|| {
                let why = "write a host without scheme: example.com, *.example.com, 192.0.2.1, [2001:db8::1] or *; \
                       behind it :PORT, or :* for all ports, where the port is not that of the scheme";
                BadConfig::new(key, entry, why)
            })
        };
        entries.iter().map(read).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether the host and port of a URL are allowed.
    pub(super) fn allow(&self, url: &Url) -> bool {
        let Some(host) = url.host() else {
            return false;
        };
        let named = |entry: &&HostRule| entry.names.have(&host);
        self.0.iter().filter(named).any(|entry| match entry.port {
            // `Url` drops a port that is its scheme's default.
            AllowedPort::Usual => url.port().is_none(),
            AllowedPort::One(port) => url.port_or_known_default() == Some(port),
            AllowedPort::Any => true,
        })
    }

    /// Returns whether the list is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl HostRule {
    fn read(text: &str) -> Option<Self> {
        // The colons of an IPv6 address are in brackets.
        let behind = text.rfind(']').map_or(0, |bracket| bracket + 1);
        let (names, port) = match text[behind..].split_once(':') {
            None => (text, AllowedPort::Usual),
            Some((rest, port)) => {
                let port = match port {
                    "*" => AllowedPort::Any,
                    port if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
                        AllowedPort::One(port.parse().ok()?)
                    }
                    _ => return None,
                };
                (&text[..behind + rest.len()], port)
            }
        };
        let names = Names::read(names)?;
        Some(Self { names, port })
    }
}

impl Names {
    fn have(&self, host: &Host<&str>) -> bool {
        match (self, host) {
            (Self::Any, _) => true,
            // The suffix begins with a dot, so `evilexample.com` is not below `example.com`.
            (Self::Below(suffix), Host::Domain(name)) => rooted(name).ends_with(suffix.as_str()),
            (Self::One(Host::Domain(one)), Host::Domain(name)) => one == rooted(name),
            (Self::One(Host::Ipv4(one)), Host::Ipv4(address)) => one == address,
            (Self::One(Host::Ipv6(one)), Host::Ipv6(address)) => one == address,
            _ => false,
        }
    }

    fn read(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Any);
        }
        let (below, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text),
        };
        // The parser of URLs, so that an entry and a URL have the same form: lower case, punycode, `0x7f.1` as an
        // address.
        match Host::parse(name).ok()? {
            Host::Domain(name) if name.contains('*') => None,
            Host::Domain(name) if below => Some(Self::Below(format!(".{}", rooted(&name)))),
            Host::Domain(name) => Some(Self::One(Host::Domain(rooted(&name).to_owned()))),
            _ if below => None,
            address => Some(Self::One(address)),
        }
    }
}

/// Returns a name without the final dot of a fully qualified name: both are the same host.
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
            let allowed =
                |text: &str| hosts.allow(&Url::parse(&format!("https://{text}/")).unwrap());
            yes.split_whitespace()
                .for_each(|host| assert!(allowed(host), "{entry}: {host}"));
            no.split_whitespace()
                .for_each(|host| assert!(!allowed(host), "{entry}: {host}"));
        }
        assert!(!list(&[]).allow(&Url::parse("https://example.com").unwrap()));
    }

    #[test]
    fn ev_414_an_entry_is_for_the_port_it_names_or_that_of_the_scheme() {
        let (plain, secure) = ("http://h.example", "https://h.example");
        for (entry, scheme, yes, no) in [
            (
                "h.example",
                secure,
                &["", ":443"][..],
                &[":80", ":8443", ":22"][..],
            ),
            ("h.example", plain, &["", ":80"], &[":443", ":6379"]),
            ("h.example:8443", secure, &[":8443"], &["", ":443", ":8444"]),
            ("h.example:443", secure, &["", ":443"], &[":8443"]),
            ("*.example:8443", secure, &[":8443"], &[""]),
            ("*:8443", secure, &[":8443"], &[""]),
            ("*", secure, &[""], &[":8443"]),
            ("h.example:*", secure, &["", ":1", ":65535"], &[]),
        ] {
            let hosts = list(&[entry]);
            let allowed = |port| hosts.allow(&Url::parse(&format!("{scheme}{port}/")).unwrap());
            yes.iter()
                .for_each(|port| assert!(allowed(port), "{entry} {port}"));
            no.iter()
                .for_each(|port| assert!(!allowed(port), "{entry} {port}"));
        }
        let hosts = list(&["[::1]:8000"]);
        assert!(hosts.allow(&Url::parse("https://[::1]:8000/").unwrap()));
        assert!(!hosts.allow(&Url::parse("https://[::1]/").unwrap()));
    }

    #[test]
    fn ev_414_entries_that_name_no_host_are_refused() {
        for entry in [
            "",
            "https://example.com",
            "example.com:",
            "example.com:http",
            "example.com:65536",
            "example.com:+1",
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
        /// Only what an entry spells out is allowed, whatever surrounds it.
        #[test]
        fn ev_414_only_listed_names_are_allowed(name in "[a-z.]{1,30}") {
            let hosts = list(&["example.com", "*.example.org"]);
            let name = name.trim_start_matches('.');
            let allowed = Url::parse(&format!("https://{name}/")).is_ok_and(|url| hosts.allow(&url));
            let plain = name.strip_suffix('.').unwrap_or(name);
            prop_assert_eq!(allowed, plain == "example.com" || plain.ends_with(".example.org"));
        }
    }
}
