//! Addresses of Triton servers (D-40).

use percent_encoding::percent_decode_str;
use url::{Position, Url};

use super::error::Error;
use crate::address::KEY_IN_URL;

/// The transport of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TritonScheme {
    Http,
    Grpc,
}

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TritonTarget {
    pub(super) carrier: TritonScheme,
    pub(super) secure: bool,
    /// The host, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// The value of the header `host`.
    pub(super) authority: String,
    pub(super) model: Option<String>,
}

impl TritonTarget {
    pub(super) fn read(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").ok_or(NO_URL)?;
        let (carrier, secure, port) = match scheme {
            "triton+http" => (TritonScheme::Http, false, 80),
            "triton+https" => (TritonScheme::Http, true, 443),
            "triton+grpc" => (TritonScheme::Grpc, false, 8001),
            "triton+grpcs" => (TritonScheme::Grpc, true, 8001),
            _ => {
                return Err(Error::Address(
                    "it must begin with triton+http://, triton+https://, triton+grpc:// or triton+grpcs://",
                ));
            }
        };
        // The URL parser would take the model for the host.
        if rest.starts_with('/') {
            return Err(Error::Address("it has no host"));
        }
        // Only with a scheme that the URL parser knows does it parse hosts as hosts. The default port of `ftp` is none
        // of Triton's.
        let url = Url::parse(&format!("ftp://{rest}")).map_err(|_| NO_URL)?;
        // URLs are shown and logged; keys are not.
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Error::Address(KEY_IN_URL));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(Error::Address("nothing can follow the model's name"));
        }
        let host = url.host_str().filter(|host| !host.is_empty());
        let host = host.ok_or(Error::Address("it has no host"))?;
        let port = match url[Position::AfterHost..Position::BeforePath].strip_prefix(':') {
            Some(written) => written.parse().map_err(|_| NO_URL)?,
            // The URL parser drops the default port of its scheme.
            None if rest.split('/').next().is_some_and(|at| at.ends_with(":21")) => 21,
            None => port,
        };
        Ok(Self {
            carrier,
            secure,
            authority: format!("{host}:{port}"),
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
            model: model(url.path())?,
        })
    }
}

fn model(path: &str) -> Result<Option<String>, Error> {
    // A slash in a name is written `%2F` (TR-201), so a further segment is a mistake, not a part of the name.
    let name = path.trim_matches('/');
    if name.is_empty() {
        return Ok(None);
    }
    let bad = Error::Address("what follows the host must be one model's name, percent-encoded");
    if name.contains('/') {
        return Err(bad);
    }
    let name = percent_decode_str(name)
        .decode_utf8()
        .map_err(|_| bad.clone())?;
    if name.chars().any(char::is_control) {
        return Err(bad);
    }
    Ok(Some(name.into_owned()))
}

const NO_URL: Error = Error::Address("it is not a URL");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_201_an_address_is_a_host_and_optionally_one_encoded_model() {
        for (url, carrier, secure, authority, host, model) in [
            (
                "triton+http://h:8000",
                TritonScheme::Http,
                false,
                "h:8000",
                "h",
                None,
            ),
            (
                "triton+http://h",
                TritonScheme::Http,
                false,
                "h:80",
                "h",
                None,
            ),
            (
                "triton+https://h/",
                TritonScheme::Http,
                true,
                "h:443",
                "h",
                None,
            ),
            (
                "triton+grpc://h/m",
                TritonScheme::Grpc,
                false,
                "h:8001",
                "h",
                Some("m"),
            ),
            (
                "triton+grpcs://[::1]:9/org%2Fm",
                TritonScheme::Grpc,
                true,
                "[::1]:9",
                "::1",
                Some("org/m"),
            ),
            (
                "triton+http://h:21",
                TritonScheme::Http,
                false,
                "h:21",
                "h",
                None,
            ),
        ] {
            let target = TritonTarget::read(url).unwrap();
            assert_eq!((target.carrier, target.secure), (carrier, secure), "{url}");
            assert_eq!(
                (&*target.authority, &*target.host),
                (authority, host),
                "{url}"
            );
            assert_eq!(target.model.as_deref(), model, "{url}");
        }
    }

    #[test]
    fn tr_201_other_addresses_are_refused() {
        for url in [
            "",
            "h:8000",
            "http://h:8000",
            "triton+http://",
            "triton+http:///m",
            "triton+http://name:secret@h",
            "triton+http://h:x",
            "triton+http://h:99999",
            "triton+http://h/a/b",
            "triton+http://h/a%ff",
            "triton+http://h/a%00",
            "triton+http://h/m?x=1",
        ] {
            assert!(
                matches!(TritonTarget::read(url), Err(Error::Address(_))),
                "{url}"
            );
        }
    }
}
