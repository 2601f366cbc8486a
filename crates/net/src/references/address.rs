//! Decides which addresses are public (EV-414).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns whether this address is globally reachable. Decided by the registries of special-purpose addresses (RFC 6890
/// and its successors); addresses that they leave open are refused.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let bits = u32::from(address);
    !NOT_PUBLIC_V4
        .iter()
        .any(|&(network, length)| (bits ^ u32::from_be_bytes(network)) >> (32 - length) == 0)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    // A host can be given as an IPv6 address that leads to an IPv4 one, which would pass a check of the outer form
    // alone.
    let low = Ipv4Addr::from(u128::from(address) as u32);
    match parts {
        // Mapped addresses, and those translated by NAT64: the embedded IPv4 address decides.
        [0, 0, 0, 0, 0, 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => is_public_v4(low),
        // 6to4 embeds the address of a router, which receives the packets.
        [0x2002, high, middle, ..] => {
            is_public_v4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(middle)))
        }
        // ISATAP: any network may have interfaces that embed an IPv4 address.
        [_, _, _, _, 0 | 0x200, 0x5efe, _, _] if !is_public_v4(low) => false,
        // All public addresses are in 2000::/3; Teredo and other special purposes are in 2001::/23, then documentation.
        [0x2001, 0..=0x1ff | 0xdb8, ..] => false,
        [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => first >> 13 == 1,
    }
}

/// Network and prefix length.
const NOT_PUBLIC_V4: &[([u8; 4], u32)] = &[
    ([0, 0, 0, 0], 8),       // this network, unspecified
    ([10, 0, 0, 0], 8),      // private
    ([100, 64, 0, 0], 10),   // carrier-grade NAT
    ([127, 0, 0, 0], 8),     // loopback
    ([169, 254, 0, 0], 16),  // link-local, and with it the metadata of clouds
    ([172, 16, 0, 0], 12),   // private
    ([192, 0, 0, 0], 24),    // protocol assignments
    ([192, 0, 2, 0], 24),    // documentation
    ([192, 88, 99, 0], 24),  // relays of 6to4
    ([192, 168, 0, 0], 16),  // private
    ([198, 18, 0, 0], 15),   // benchmarks
    ([198, 51, 100, 0], 24), // documentation
    ([203, 0, 113, 0], 24),  // documentation
    ([224, 0, 0, 0], 4),     // multicast
    ([240, 0, 0, 0], 4),     // reserved, broadcast
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_414_addresses_are_public_or_not() {
        for (public, addresses) in [
            (
                true,
                "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 \
                 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.0.3.0 192.167.255.255 192.169.0.0 \
                 198.17.255.255 198.20.0.0 203.0.112.255 203.0.114.0 223.255.255.255 \
                 2000::1 2606:4700::1111 2a00::1 3ffe::1 2001:200::1 2001:db7::1 2001:db9::1 3fff:1000::1",
            ),
            (
                false,
                "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.1 127.255.255.255 \
                 169.254.0.0 169.254.169.254 172.16.0.0 172.31.255.255 192.0.0.1 192.0.0.170 192.0.2.1 192.88.99.1 \
                 192.168.0.0 192.168.255.255 198.18.0.0 198.19.255.255 198.51.100.7 203.0.113.9 224.0.0.1 \
                 239.255.255.255 240.0.0.1 255.255.255.255 \
                 :: ::1 fc00::1 fdff::1 fe80::1 fe80::5efe:8.8.8.8 febf::1 fec0::1 ff02::1 100::1 5f00::1 4000::1 \
                 2001::1 2001:2::1 2001:10::1 2001:20::1 2001:1ff::1 2001:db8::1 3fff::1 3fff:fff::1 64:ff9b:1::1",
            ),
        ] {
            for text in addresses.split_whitespace() {
                let address: IpAddr = text.parse().unwrap();
                assert_eq!(is_public(address), public, "{text}");
            }
        }
    }

    #[test]
    fn ev_414_embedded_ipv4_addresses_are_checked() {
        for (inside, public) in [
            ([8, 8, 8, 8], true),
            ([127, 0, 0, 1], false),
            ([10, 0, 0, 1], false),
            ([100, 64, 0, 1], false),
            ([169, 254, 169, 254], false),
            ([192, 168, 1, 1], false),
            ([0, 0, 0, 0], false),
            ([224, 0, 0, 1], false),
        ] {
            let [a, b, c, d] = inside;
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            for (form, parts, public) in [
                ("mapped", [0, 0, 0, 0, 0, 0xffff, high, low], public),
                ("NAT64", [0x64, 0xff9b, 0, 0, 0, 0, high, low], public),
                ("6to4", [0x2002, high, low, 0, 0, 0, 0, 1], public),
                ("ISATAP", [0x2a00, 1, 2, 3, 0, 0x5efe, high, low], public),
                (
                    "ISATAP",
                    [0x2a00, 1, 2, 3, 0x200, 0x5efe, high, low],
                    public,
                ),
                // Never public, whatever address they embed.
                ("compatible", [0, 0, 0, 0, 0, 0, high, low], false),
                ("translated", [0, 0, 0, 0, 0xffff, 0, high, low], false),
                ("local NAT64", [0x64, 0xff9b, 1, 0, 0, 0, high, low], false),
                ("Teredo", [0x2001, 0, high, low, 0, 0, !high, !low], false),
            ] {
                let address = Ipv6Addr::from(parts);
                assert_eq!(
                    is_public(address.into()),
                    public,
                    "{form} {inside:?}: {address}"
                );
            }
        }
    }
}
